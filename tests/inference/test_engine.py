"""An answer depends on its request alone: not on arrival, neighbours, pages, chunks, what was found, or preemption."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import FinishReason, Request
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.extension.retention import layers
from tests.inference.models import ours, theirs, weights
from tests.inference.ranked import answers_on_ranks, pages_of_stages, run
from tests.thorough import mostly_thorough

WINDOW, B = 7, 4
SAMPLED = SamplingParams(0.8, 20, 0.95)
TEXT = [5, 9, 3, 7, 7, 50, 60, 5, 9, 3]
PLAIN = EngineConfig(max_model_len=24, enable_prefix_caching=False)
REQUESTS = {
    "token": Request((TEXT[0],), 9),
    "page - 1": Request(tuple(TEXT[: B - 1]), 9, SAMPLED, seed=1),
    "page": Request(tuple(TEXT[:B]), 5),
    "page + 1": Request(tuple(TEXT[: B + 1]), 9, SAMPLED, n=3),
    "two pages": Request(tuple(TEXT[: 2 * B]), 9),
    "longer": Request(tuple(TEXT), 12, prompt_log_probs=2),
    "other": Request((TEXT[0], *TEXT), 4, SamplingParams(), n=2, seed=3),
}
REQUESTS = {name: dataclasses.replace(request, log_probs=0) for name, request in REQUESTS.items()}
SMALL = EngineConfig(max_model_len=24, page_size=B)
CONFIGS = {
    "chunks of 1": dataclasses.replace(SMALL, max_num_seqs=1, max_num_batched_tokens=1, page_size=5),
    "window - 1, few pages": dataclasses.replace(SMALL, max_num_seqs=6, max_num_batched_tokens=WINDOW - 1, num_pages=8),
    "window": dataclasses.replace(SMALL, max_num_seqs=4, max_num_batched_tokens=WINDOW, page_size=1),
    "window + 1": dataclasses.replace(SMALL, max_num_seqs=5, max_num_batched_tokens=WINDOW + 1),
    "one after the other": dataclasses.replace(SMALL, max_num_seqs=3, max_num_batched_tokens=100, num_pages=6),
}


@functools.cache
def model_of(name):
    """A model of Hugging Face's families, or one of `tests/extension`'s layers, which keep a state of each sequence."""
    if name != "retention":
        return ours(name)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "vocab_size": 99}
    config = family_config("llama", **sizes)
    return build_model(config, Mesh.serial(), 1, layers(config)).eval()


def scores(model, sequence):
    """Log-probabilities of the prompt from its second token on, and of the answer, in one pass."""
    with torch.no_grad():
        logits = model.full_logits(torch.tensor([sequence.tokens]))[0, :-1] / sequence.request.sampling.temperature
    values = logits.log_softmax(-1).gather(1, torch.tensor(sequence.tokens[1:])[:, None])[:, 0].tolist()
    return values[: sequence.prompt_length - 1], values[sequence.prompt_length - 1 :]


@functools.cache
def alone(name):
    """Each request in an engine of its own, in one chunk, compared with a pass over the whole."""
    model, found = model_of(name), {}
    for key, request in REQUESTS.items():
        found |= run(Engine(model, PLAIN), {key: request})
        for sequence in found[key]:
            prompt, answer = scores(model, sequence)
            assert sequence.log_probs == pytest.approx(answer, abs=1e-5)
            assert sequence.prompt_log_probs == pytest.approx(prompt if request.prompt_log_probs else [], abs=1e-5)
    return found


def assert_same(found, want):
    """Token for token, and log-probabilities of prompt and answer to 1e-5."""
    for key, sequences in found.items():
        for made, expected in zip(sequences, want[key], strict=True):
            assert made.answer == expected.answer and made.reason is expected.reason, (key, made.index)
            assert made.log_probs == pytest.approx(expected.log_probs, abs=1e-5), (key, made.index)
            assert made.prompt_log_probs == pytest.approx(expected.prompt_log_probs, abs=1e-5), key
            for top, expected_top in zip(made.prompt_top, expected.prompt_top, strict=True):
                assert [token for token, _ in top] == [token for token, _ in expected_top], key


WITH_STATES = ["retention", "nemotron_h", "qwen3_next"]
FAMILIES = ["llama2", "mistral", "deepseek_v3", "mixtral", *WITH_STATES]


@pytest.mark.parametrize("name", mostly_thorough(FAMILIES, ("mistral", "retention").__contains__, [1]))
def test_an_answer_depends_on_its_request_alone(name):
    want, preempted, hits = alone(name), set(), 0
    for what, config in CONFIGS.items():
        engine = Engine(model_of(name), config)
        requests = {key: request for key, request in REQUESTS.items() if request.n <= config.max_num_seqs}
        assert_same(run(engine, requests), want)
        assert_same(run(engine, dict(reversed(requests.items())), every=1), want)
        hits += engine.scheduler.blocks.hits
        preempted |= {what} if engine.scheduler.preemptions else set()
    assert "window - 1, few pages" in preempted
    assert (hits > 0) == (name not in WITH_STATES), "a state holds all its tokens: no page of it can be left out"


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    mostly_thorough(
        [
            ("mistral", TP2),
            ("deepseek_v3", PP2 | {"num_layers_in_first_pipeline_stage": 2}),
            ("deepseek_v3", TP2 | {"sequence_parallel": True}),
            ("mixtral", EP2),
        ],
        [1],
    ),
)
def test_nor_does_it_depend_on_the_layout(ranks, name, layout):
    """In few pages and small chunks, with what was found."""
    config, tensors = weights(name)
    fields = {"moe_token_dispatcher_type": "alltoall"} if layout is EP2 else {}
    case = (config.replace(**fields), tensors), layout, CONFIGS["window - 1, few pages"], REQUESTS
    first, *_ = ranks(2).run(answers_on_ranks, *case)
    assert first.preempted and first.hits
    assert_same(first.answers, alone(name))


def test_nor_on_31_neighbours():
    """Of all lengths, half of them sampled, that preempt each other."""
    generator = torch.Generator().manual_seed(0)
    config = EngineConfig(max_model_len=40, page_size=B, num_pages=60, max_num_batched_tokens=40)
    engine, requests = Engine(model_of("mistral"), config), {}
    for i in range(31):
        prompt = tuple(torch.randint(0, 99, (1 + i % 20,), generator=generator).tolist())
        requests[str(i)] = Request(prompt, 9 + i % 7, SAMPLED if i % 2 else GREEDY)
    requests["page - 1"] = REQUESTS["page - 1"]
    found = run(engine, requests)
    assert engine.scheduler.preemptions
    assert_same({"page - 1": found["page - 1"]}, alone("mistral"))


def test_answers_to_one_prompt_differ_and_the_first_is_that_of_n_1():
    request = REQUESTS["page + 1"]
    three = alone("mistral")["page + 1"]
    one = run(Engine(model_of("mistral"), SMALL), {"one": dataclasses.replace(request, n=1)})["one"]
    assert_same({"one": one}, {"one": three[:1]})
    assert len({tuple(sequence.answer) for sequence in three}) == 3


@pytest.mark.parametrize("raw", [False, True])
def test_log_probabilities_of_a_prompt_are_teacher_forced(raw):
    """Hugging Face's, though its pages are known already, with the most likely tokens in each place."""
    engine = Engine(model_of("mistral"), dataclasses.replace(SMALL, max_num_seqs=2, max_num_batched_tokens=3))
    asked = Request(tuple(TEXT), 2, SAMPLED, log_probs=3, prompt_log_probs=3, raw_log_probs=raw)
    run(engine, {"before": Request(tuple(TEXT), 2)})
    (made,) = run(engine, {"asked": asked, "beside": Request(tuple(TEXT), 2)})["asked"]
    with torch.no_grad():
        logits = theirs("mistral")(torch.tensor([made.tokens])).logits[0, :-1]
    want = (logits / (1.0 if raw else 0.8)).log_softmax(-1)
    top = [*made.prompt_top, *made.top]
    for value, best, row, token in zip(made.prompt_log_probs + made.log_probs, top, want, made.tokens[1:], strict=True):
        assert value == pytest.approx(row[token].item(), abs=1e-5)
        values, ids = row.topk(3)
        assert [i for i, _ in best] == ids.tolist()
        assert [v for _, v in best] == pytest.approx(values.tolist(), abs=1e-5)


def frequency(presence, count):
    """OpenAI's presence and frequency penalties, as a processor of logits."""

    def process(ids, logits):
        for row, tokens in zip(logits, ids[:, len(TEXT) :], strict=True):
            for token in set(tokens.tolist()):
                row[token] -= presence + count * int((tokens == token).sum())
        return logits

    return {"logits_processor": [process]}


@pytest.mark.parametrize(
    "params, fields, options",
    [
        ({"repetition_penalty": 1.7}, {}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.6}, {}, {"repetition_penalty": 0.6}),
        ({"presence_penalty": 0.4, "frequency_penalty": 0.3}, {}, frequency(0.4, 0.3)),
        ({"logit_bias": ((8, 4.0), (11, -9.0))}, {}, {"sequence_bias": {(8,): 4.0, (11,): -9.0}}),
        ({}, {"min_new_tokens": 6}, {"min_new_tokens": 6}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_what_changes_logits_is_hugging_faces(params, fields, options):
    """With neighbours that ask for nothing, and a stop id that is drawn without."""
    free = run(Engine(model_of("gpt2"), PLAIN), {"free": Request(tuple(TEXT), 12)})["free"][0].answer
    stop = free[2]
    asked = Request(tuple(TEXT), 12, SamplingParams(top_k=1, **params), stop_ids=frozenset([stop]), **fields)
    made = run(Engine(model_of("gpt2"), SMALL), {"a": REQUESTS["page"], "asked": asked, "b": REQUESTS["other"]})
    want = (
        theirs("gpt2")
        .generate(torch.tensor([TEXT]), max_new_tokens=12, do_sample=False, eos_token_id=stop, **options)[
            0, len(TEXT) :
        ]
        .tolist()
    )
    assert made["asked"][0].answer == want != free[:3]


def test_what_is_aborted_gives_everything_back():
    """While it waits, while its prompt is read, while it answers, before and after it forks."""
    want = alone("mistral")
    for steps in range(9):
        engine = Engine(model_of("mistral"), dataclasses.replace(CONFIGS["window"], num_pages=60))
        for key in ("page + 1", "longer", "other", "page - 1"):
            engine.add_request(REQUESTS[key], key)
        kept = engine.sequences["page - 1"]
        for _ in range(steps):
            engine.step()
        ended = [output for key in ("page + 1", "longer", "other") for output in engine.abort(key)]
        assert all(output.reason is FinishReason.ABORT and not output.tokens for output in ended)
        assert len(ended) == 6 and engine.abort("longer") == [] and engine.sequences.keys() == {"page - 1"}
        blocks = engine.scheduler.blocks
        blocks.check([sequence.pages for sequence in kept])
        assert blocks.available == blocks.capacity - sum(len(sequence.pages) for sequence in kept)
        while engine.has_work:
            engine.step()
        assert_same({"page - 1": kept}, want)


class SmallSteps(Scheduler):
    """Of three tokens at most."""

    def __init__(self, blocks, seats, tokens, longest, *rest, **options):
        super().__init__(blocks, min(seats, 3), 3, longest, *rest, **options)


def test_a_scheduler_of_ones_own_plans_the_steps_and_changes_no_answer():
    counted = {}
    for scheduler_cls in (Scheduler, SmallSteps):
        engine = Engine(model_of("mistral"), CONFIGS["window + 1"], scheduler_cls=scheduler_cls)
        assert_same(run(engine, {"longer": REQUESTS["longer"]}), alone("mistral"))
        counted[scheduler_cls] = engine.steps
    assert counted[SmallSteps] == counted[Scheduler] + 2, "ten tokens of a prompt: three a step in place of eight"


def change(model):
    """Other weights, written as an optimizer does that knows their memory alone: parameters count no version."""
    for param in model.parameters():
        param.data.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))


def test_no_page_of_old_weights_is_read():
    model, request = copy.deepcopy(model_of("mistral")), REQUESTS["two pages"]
    engine = Engine(model, SMALL)
    run(engine, {"old": request})
    change(model)
    (stale,) = run(engine, {"stale": request})["stale"]
    assert abs(stale.log_probs[0] - scores(model, stale)[1][0]) > 1e-3, "a page of before would be seen"
    assert engine.new_weights() == 1
    for found in (0, B):
        (new,) = run(engine, {"new": request})["new"]
        assert new.cached == found and new.log_probs == pytest.approx(scores(model, new)[1], abs=1e-5)


def test_an_answer_goes_on_with_new_weights():
    """As if all before had been computed with them; what it has said already stays."""
    model, request = copy.deepcopy(model_of("mistral")), REQUESTS["two pages"]
    engine = Engine(model, SMALL)
    engine.add_request(request, "under way")
    (made,) = engine.sequences["under way"]
    for _ in range(4):
        engine.step()
    said, before = made.answer, list(made.log_probs)
    change(model)
    engine.new_weights()
    while engine.has_work:
        engine.step()
    assert len(said) == 4 and made.answer[:4] == said and made.log_probs[:4] == before
    assert made.log_probs[4:] == pytest.approx(scores(model, made)[1][4:], abs=1e-5)


def test_generate_leaves_nothing_and_finds_nothing_under_way(monkeypatch):
    engine = Engine(model_of("gpt2"), SMALL)
    whole = generate(engine, [TEXT, TEXT[:3]], 6)
    step = engine.step

    def interrupted():
        if engine.steps == 3:
            raise KeyboardInterrupt
        return step()

    engine.steps = 0
    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, [TEXT, TEXT[:3]], 6)
    monkeypatch.undo()
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.capacity
    assert [c.tokens for c in generate(engine, [TEXT, TEXT[:3]], 6)] == [c.tokens for c in whole]
    engine.add_request(Request((1,), 2), "mine")
    with pytest.raises(DataError, match="there is a request 'mine' already"):
        engine.add_request(Request((1,), 2), "mine")
    with pytest.raises(ConfigError, match="generate while 1 requests are under way"):
        generate(engine, [TEXT], 6)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"n": 0}, "n is 0"),
        ({"min_new_tokens": 4}, "min_new_tokens is 4 and max_new_tokens is 3"),
        ({"log_probs": -1}, "log_probs is -1"),
        ({"prompt_log_probs": 100}, "prompt_log_probs is 100 in a vocabulary of 99"),
        ({"sampling": SamplingParams(logit_bias=((99, 1.0),))}, "logit_bias of id 99"),
    ],
    ids=str,
)
def test_requests_that_are_refused(fields, words):
    engine = Engine(model_of("gpt2"), SMALL)
    with pytest.raises(ConfigError, match=words):
        engine.add_request(Request((1,), 3, **fields), "no")
    assert not engine.has_work and not engine.sequences


def test_engines_that_are_refused():
    for name, value in (("page_size", 0), ("num_pages", 0), ("max_num_seqs", -1), ("cache_bytes", 0)):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            EngineConfig(**{name: value})
    with pytest.raises(ConfigError, match="max_num_batched_tokens 8 for max_num_seqs 9"):
        Engine(model_of("gpt2"), EngineConfig(max_num_seqs=9, max_num_batched_tokens=8))


def test_stages_that_keep_more_decide_how_many_pages_there_are(ranks):
    """One layer before two: both have room for as many tokens, and the words are those of one rank."""
    model = weights("deepseek_v3")
    per_token = 4 * (20 + 8)  # the latent and the turned key of a layer
    found = ranks(2).run(pages_of_stages, model, EngineConfig(page_size=4, cache_bytes=24 * 2 * per_token))
    alone = generate(Engine(ours("deepseek_v3"), EngineConfig(page_size=4)), [TEXT], 12)[0].tokens
    assert found == [(1 + 6, per_token * 4 * 7 * layers_, alone) for layers_ in (1, 2)]
