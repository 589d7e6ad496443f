"""Log-probabilities of given continuations are those of a teacher-forced pass, in chunks, from pages, on ranks."""

from __future__ import annotations

import math

import pytest
import torch

from minimegatron.errors import ConfigError, NumericsError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete, generate, score
from minimegatron.inference.sampling import SamplingParams
from minimegatron.inference.sequence import Request
from tests.inference.models import ours, theirs, weights
from tests.inference.ranked import PROMPTS, build, ids, scores
from tests.thorough import SLOW, mostly_thorough

LONG = ids(1, 40, seed=3)[0].tolist()
# Two answers to one prompt of whole pages, one to the prompt and a token, one token, none, and all places there are.
SEQUENCES = [
    *((LONG[:12], LONG[12:20]), (LONG[:12], [7]), (LONG[:13], LONG[20:31])),
    *(([5], LONG[:9]), (LONG[:8], []), (LONG, [1, 2])),
]


def teacher_forced(name, sequences, temperature=1.0):
    """By Hugging Face's model."""
    found = []
    for prompt, answer in sequences:
        with torch.no_grad():
            logits = theirs(name)(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer, dtype=torch.int64)[:, None])
        found.append(log_probs[:, 0].tolist())
    return found


def assert_close(found, want):
    assert [len(each) for each in found] == [len(each) for each in want]
    for a, b in zip(found, want, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize(
    "name",
    mostly_thorough(["mistral", "deepseek_v3", "gpt2", "llama3.1", "gemma2", "qwen3", "mixtral"], [0, 1]),
)
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_scores_are_teacher_forced(name, budget):
    config = EngineConfig(42, page_size=4, num_pages=14, max_num_seqs=3, max_num_batched_tokens=budget)
    engine = Engine(ours(name), config)  # room for one of the longest and little else: some lose their pages
    assert_close(score(engine, SEQUENCES), teacher_forced(name, SEQUENCES))
    hits = engine.scheduler.blocks.hits
    assert_close(score(engine, SEQUENCES[:3], temperature=0.7), teacher_forced(name, SEQUENCES[:3], 0.7))
    assert engine.scheduler.blocks.hits > hits, "no page was found again"
    engine.scheduler.blocks.check([])


def test_what_was_generated_is_scored_alike():
    engine, params = Engine(ours("mistral")), SamplingParams(0.8, 20, 0.95)
    made = generate(engine, PROMPTS, 9, params, seed=2)
    found = score(engine, [(p, m.tokens) for p, m in zip(PROMPTS, made, strict=True)], temperature=0.8)
    assert_close(found, [m.log_probs for m in made])
    assert engine.drawn_tokens == 27, "a score draws nothing"


@SLOW
@pytest.mark.parametrize("world", mostly_thorough([2, 4], [0]))
def test_over_ranks(ranks, world):
    tp, pp = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    ep, sp = {"expert_model_parallel_size": 2}, {"sequence_parallel": True}
    uneven = pp | {"num_layers_in_first_pipeline_stage": 2}  # of three layers
    cases = {
        2: [("mistral", tp | sp), ("deepseek_v3", uneven), ("mixtral", ep)],
        4: [("qwen3_moe", uneven | ep), ("qwen2.5", tp | pp)],
    }[world]
    first, *others = ranks(world).run(scores, [(weights(name), layout) for name, layout in cases], SEQUENCES)
    assert all(other == first for other in others)
    for i, (name, _) in enumerate(cases):
        for found in first[2 * i : 2 * i + 2]:
            assert_close(found, teacher_forced(name, SEQUENCES))


def test_a_score_has_one_version():
    """Weights that change in the middle of a prompt: what the old ones have said of its beginning is forgotten."""
    model = build(*weights("llama2"))
    engine = Engine(model, EngineConfig(64, page_size=4, max_num_seqs=1, max_num_batched_tokens=9))
    engine.add_request(Request(tuple(LONG[:20]), 0, SamplingParams(), prompt_log_probs=0), "a")
    (sequence,) = engine.sequences["a"]
    assert engine.step() == [] and len(sequence.prompt_log_probs) == 9
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
    engine.new_weights()
    (output,) = [output for _ in range(3) for output in engine.step()]
    (want,) = score(Engine(model), [(LONG[:1], LONG[1:20])])
    assert sequence.prompt_log_probs == pytest.approx(want, abs=1e-6) and output.tokens == ()
    assert output.weight_version == 1


def test_refusals():
    engine = Engine(build(*weights("llama2")))
    with pytest.raises(ConfigError, match="the first token has none before it"):
        score(engine, [((), (1, 2))])
    with pytest.raises(ConfigError, match="max_new_tokens is 0 and n is 2"):
        complete(engine, [Request((1, 2), 0, n=2, prompt_log_probs=0)])
    with torch.no_grad():
        engine.model.embedding.word_embeddings.weight[7] = math.nan
    with pytest.raises(NumericsError) as error:
        score(engine, [((1, 2), (3,)), ((1, 2), (3, 7, 4))])
    assert error.value.where == "prompt 1, token 4"


def test_a_text_that_fills_all_pages_is_scored():
    model = ours("llama2")
    text = ids(1, 32)[0].tolist()
    small = Engine(model, EngineConfig(max_model_len=32, num_pages=2, max_num_seqs=1))
    (scores,) = score(small, [(text[:1], text[1:])])
    (want,) = score(Engine(model), [(text[:1], text[1:])])
    assert scores == pytest.approx(want, abs=1e-5)
