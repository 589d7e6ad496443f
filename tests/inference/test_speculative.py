"""Speculation changes no answer: greedy word for word, drawn ones in distribution, whoever proposes or has pages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.sampling import GREEDY, Rows, SamplingParams, distribution, draw, uniform
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import FinishReason, Request
from minimegatron.inference.speculative import NGrams, SpeculativeConfig, verified
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.inference.models import NAMES, ours, weights
from tests.inference.ranked import PROMPTS, build, speculated
from tests.inference.test_sampling import RARE
from tests.recorder import OnACpu
from tests.thorough import mostly_thorough

SAMPLED = SamplingParams(0.8, 20, 0.95)
NGRAM = SpeculativeConfig("ngram", 3, 3, 1)
DRAFT = SpeculativeConfig("draft", 3)
P, Q = torch.tensor([1.0, 0.4, -0.3, 0.0, -2.0]), torch.tensor([-0.5, 1.1, 0.6, 0.2, -1.0])


@functools.cache
def like(name, noise=0.02):
    """A model that mostly agrees with `ours(name)`."""
    config, tensors = weights(name)
    generator = torch.Generator().manual_seed(1)
    return build(config, {key: t + noise * torch.randn(t.shape, generator=generator) for key, t in tensors.items()})


def prompts(count):
    """Of 1 to 12 tokens; half of them repeat themselves."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        words = torch.randint(1, 99, (1 + i % 6,), generator=generator).tolist()
        found.append(words * (1 + i % 2))
    return found


def answers(engine, requests, at_once=10**6):
    """(id, answer) -> its sequence; so many requests arrive before each step."""
    waiting, found = list(enumerate(requests)), {}
    while waiting or engine.has_work:
        for i, request in waiting[:at_once]:
            engine.add_request(request, str(i))
            for sequence in engine.sequences[str(i)]:
                found[i, sequence.index] = sequence
        waiting = waiting[at_once:]
        for output in engine.step():
            assert len(output.tokens) == len(output.log_probs) == len(output.top)
        engine.scheduler.blocks.check([sequence.pages for sequence in engine.scheduler.running])
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.capacity
    return found


def words(sequences):
    return {key: (sequence.answer, sequence.reason) for key, sequence in sequences.items()}


def uniforms(of, count):
    return torch.tensor([uniform(5, 0, place, of) for place in range(count)], dtype=torch.float64)


def chi2(found, shares):
    """Of words [n] that were drawn from shares [V], and whether so much is rarer than 1 of 1000."""
    counts, n = torch.bincount(found, minlength=len(shares)).double(), len(found)
    assert counts[shares == 0].sum() == 0
    kept = shares > 0
    value = ((counts - n * shares)[kept].square() / (n * shares[kept])).sum().item()
    return value, value < RARE[int(kept.sum()) - 1]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(0.7, 4, 0.9)], ids=["all", "top_p", "three"]
)
def test_frequencies_are_the_models_whoever_proposes(params):
    """Chi-squared of 20,000 words, with p and q cut alike; and as many acceptances as there can be."""
    n, rows = 20_000, Rows.of([params])
    p, q = distribution(P[None], rows)[0], distribution(Q[None], rows)[0]
    proposed = draw(q.expand(n, -1), uniforms(":proposal", n))
    found = verified(p.expand(n, -1), q.expand(n, -1), proposed, uniforms(":verdict", n), uniforms("", n))
    value, likely = chi2(found, p)
    assert likely, value
    overlap = torch.minimum(p, q).sum().item()
    assert 0.2 < overlap < 0.9 and abs((found == proposed).double().mean() - overlap) < 4 * (0.25 / n) ** 0.5


def test_a_proposer_that_is_sure_or_broken():
    p, n = distribution(P[None], Rows.of([SamplingParams()])).expand(1000, -1), 1000
    proposed = torch.full((n,), 2)
    for q in (torch.full_like(p, torch.nan), torch.zeros_like(p).index_fill(1, torch.tensor([2]), 1.0)):
        value, likely = chi2(verified(p, q, proposed, uniforms(":verdict", n), uniforms("", n)), p[0])
        assert likely, value
    assert torch.equal(verified(p, p.clone(), proposed, uniforms(":verdict", n), uniforms("", n)), proposed)


@functools.cache
def five_words(seed):
    """A model of a vocabulary of 5."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
    config = family_config("llama", **sizes, vocab_size=5, max_position_embeddings=16, init_method_std=0.5)
    return build_model(config, Mesh.serial(), seed).eval()


def test_answers_are_distributed_as_the_model_says():
    """All 125 answers of three words, of which the last two are proposed: chi-squared over those that are likely."""
    model, draft, n, prompt, params = five_words(0), five_words(1), 2000, (1, 4), SamplingParams(1.2, top_p=0.9)
    config = EngineConfig(
        page_size=4, max_num_seqs=n, max_num_batched_tokens=4 * n, speculative=SpeculativeConfig("draft", 2)
    )
    engine = Engine(model, config, draft=draft)
    found = answers(engine, [Request(prompt, 4, params, n=n)])
    assert 0.1 < engine.accepted_tokens / engine.proposed_tokens < 0.9
    every = torch.tensor(list(itertools.product(range(5), repeat=3)))
    with torch.no_grad():
        logits = model.full_logits(torch.cat([torch.tensor([prompt]).expand(125, -1), every], 1))[:, 1:4]
    shares = distribution(logits.flatten(0, 1), Rows.of([params] * 375)).view(125, 3, 5)
    want = shares.gather(-1, every[..., None]).squeeze(-1).prod(-1)
    assert want.sum().item() == pytest.approx(1.0)
    counts = torch.zeros(125, dtype=torch.float64)
    for sequence in found.values():
        a, b, c, _ = sequence.answer
        counts[25 * a + 5 * b + c] += 1
    assert counts[want == 0].sum() == 0
    often = n * want >= 5
    rest = torch.tensor([counts[~often].sum(), n * want[~often].sum()])
    counts, want = torch.cat([counts[often], rest[:1]]), torch.cat([n * want[often], rest[1:]])
    counts, want = counts[want > 0], want[want > 0]
    freedom = len(want) - 1
    value = ((counts - want).square() / want).sum().item()
    assert freedom > 15 and value < freedom + 4.5 * (2 * freedom) ** 0.5, (value, freedom)


@pytest.mark.parametrize("config, draft", [(NGRAM, None), (DRAFT, "like")], ids=["ngram", "draft"])
def test_greedy_words_of_200_prompts(config, draft):
    model = ours("mistral")
    requests = [Request(tuple(prompt), 5 + i % 11, log_probs=2) for i, prompt in enumerate(prompts(200))]
    engine = Engine(model, EngineConfig(max_model_len=40, speculative=config), draft=like("mistral") if draft else None)
    found, want = answers(engine, requests), plain_answers()
    assert words(found) == words(want)
    assert 0 < engine.accepted_tokens < engine.proposed_tokens
    for key, sequence in found.items():
        assert sequence.log_probs == pytest.approx(want[key].log_probs, abs=1e-5)
        assert [[i for i, _ in top] for top in sequence.top] == [[i for i, _ in top] for top in want[key].top]


@functools.cache
def plain_answers():
    requests = [Request(tuple(prompt), 5 + i % 11, log_probs=2) for i, prompt in enumerate(prompts(200))]
    return answers(Engine(ours("mistral"), EngineConfig(max_model_len=40)), requests)


@pytest.mark.parametrize("name", mostly_thorough(NAMES, lambda name: name == "deepseek_v3"))
def test_greedy_words_of_every_family(name):
    requests = [Request(tuple(prompt), 12) for prompt in prompts(24)]
    want = words(answers(Engine(ours(name), EngineConfig(40)), requests))
    for config, draft in ((NGRAM, None), (DRAFT, like(name))):
        engine = Engine(ours(name), EngineConfig(40, speculative=config), draft=draft)
        assert words(answers(engine, requests)) == want and engine.proposed_tokens > 0


def test_an_n_gram_changes_no_drawn_word():
    """With penalties, which a proposal is part of, and stop ids that may not be drawn yet."""
    params = [SAMPLED, SamplingParams(0.3, frequency_penalty=-0.3, presence_penalty=-0.5), SamplingParams(0.1), GREEDY]
    requests = [
        Request(tuple(p), 24, params[i % 4], frozenset(range(40, 50)), seed=i, n=1 + i % 2, min_new_tokens=i % 9)
        for i, p in enumerate(prompts(24))
    ]
    engine = Engine(ours("gemma2"), EngineConfig(max_model_len=40, speculative=NGRAM))
    want = answers(Engine(ours("gemma2"), EngineConfig(max_model_len=40)), requests)
    assert words(answers(engine, requests)) == words(want)
    assert 0 < engine.accepted_tokens < engine.proposed_tokens
    assert {s.reason for s in want.values()} == {FinishReason.STOP, FinishReason.LENGTH}


MIXED = [
    Request(tuple(prompt), 14, (SAMPLED, GREEDY, SamplingParams(1.3))[i % 3], seed=i, n=1 + i % 2)
    for i, prompt in enumerate([*prompts(9), PROMPTS[2] * 3, PROMPTS[2] * 3])
]
TIGHT = EngineConfig(48, page_size=4, num_pages=13, max_num_seqs=4, max_num_batched_tokens=16, speculative=DRAFT)


def test_the_draft_models_pages_keep_step():
    """What the model proposes to itself is accepted: after preemption, in forks, from pages that others have filled."""
    engine = Engine(ours("mistral"), TIGHT, draft=ours("mistral"))
    for _ in range(2):
        answers(engine, MIXED, 2)
    assert engine.scheduler.preemptions > 5 and engine.scheduler.blocks.hits > 50
    assert engine.proposed_tokens > 200 and engine.accepted_tokens == engine.proposed_tokens


def test_with_a_seed_neighbours_and_memory_change_nothing():
    roomy = dataclasses.replace(TIGHT, num_pages=None, max_num_batched_tokens=512, enable_prefix_caching=False)
    alone = {}
    for i, request in enumerate(MIXED):
        engine = Engine(ours("mistral"), roomy, draft=like("mistral"))
        alone |= {(i, index): word for (_, index), word in words(answers(engine, [request])).items()}
    engine = Engine(ours("mistral"), TIGHT, draft=like("mistral"))
    assert words(answers(engine, MIXED, 2)) == alone and words(answers(engine, MIXED)) == alone
    assert engine.scheduler.preemptions > 5 and 0 < engine.accepted_tokens < engine.proposed_tokens


def test_a_stop_id_among_accepted_tokens_is_the_end():
    """The model proposes to itself, so the stop id is accepted, and what it has proposed behind it is dropped."""
    (whole,) = answers(Engine(ours("mistral"), EngineConfig(40)), [Request((5, 9, 3), 12)]).values()
    for place in range(1, 11):
        stop = whole.answer[place]
        cut = whole.answer.index(stop) + 1
        engine = Engine(ours("mistral"), EngineConfig(40, speculative=DRAFT), draft=ours("mistral"))
        (made,) = answers(engine, [Request((5, 9, 3), 12, stop_ids=frozenset([stop]), log_probs=0)]).values()
        assert made.answer == whole.answer[:cut] and made.reason is FinishReason.STOP
        assert len(made.log_probs) == len(made.top) == cut == engine.drawn_tokens


@pytest.mark.parametrize("seed", range(40))
def test_places_for_proposals(seed):
    """A plan of plain data: all places that a sequence may have or no step for its newest token, and pages for them."""
    dice = random.Random(seed)
    k, seats, size = dice.randint(1, 4), dice.randint(1, 3), dice.randint(1, 4)
    blocks = BlockManager(1 + dice.randint(-(-18 // size), 40 // size), size)
    scheduler = Scheduler(blocks, seats, seats * (1 + k) + dice.randint(0, 3), 18, lookahead=k)
    for i in range(8):
        prompt = [dice.randint(0, 1) for _ in range(dice.randint(1, 9))]
        scheduler.add(Request(tuple(prompt), dice.randint(1, 18 - len(prompt))), str(i))
    for steps in itertools.count():
        step = scheduler.schedule()
        if not scheduler.has_work:
            break
        assert 0 < step.tokens <= scheduler.max_num_batched_tokens and steps < 500
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            left = sequence.most_tokens - len(sequence.tokens)
            assert chunk.draws == (end == len(sequence.tokens)) and chunk.start == sequence.computed
            answers = len(sequence.tokens) > sequence.prompt_length and chunk.draws
            assert chunk.proposals == (min(k, left - 1) if answers else 0)
            assert len(sequence.pages) * size >= end + chunk.proposals
            accepted = dice.randint(0, chunk.proposals)
            sequence.tokens += [dice.randint(0, 1) for _ in range(accepted)]
            scheduler.computed(chunk, accepted)
            if chunk.draws:
                sequence.append(dice.randint(0, 1))
                assert sequence.computed == len(sequence.tokens) - 1
            if sequence.reason is not None:
                scheduler.finish(sequence)
        blocks.check([sequence.pages for sequence in scheduler.running])


def brute_force(tokens, count, least, most):
    for n in range(most, least - 1, -1):
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return tokens[end : end + count]
    return []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_an_n_gram_proposes_what_followed_it_first(tokens, count, least, more):
    grams = NGrams(least, least + more)
    for length in range(1, len(tokens) + 1, 2):
        want = brute_force(tokens[:length], count, least, least + more)
        assert grams.propose(tokens[:length], count) == want


def test_a_step_with_proposals_is_not_recorded():
    recorder, requests = OnACpu(), [Request((5, 9, 3, 7), 16), Request((1, 2), 16)]
    engine = Engine(ours("mistral"), EngineConfig(40, speculative=NGRAM), recorder=recorder)
    assert words(answers(engine, requests)) == words(answers(Engine(ours("mistral"), EngineConfig(40)), requests))
    assert "record" in recorder.events and engine.proposed_tokens > 0 and len(recorder.events) < engine.steps


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    "model, draft, layout",
    mostly_thorough(
        [
            ("llama2", "llama3.1", TP2 | {"sequence_parallel": True}),
            ("llama2", "llama3.1", PP2),
            ("llama2", None, PP2),
            ("llama2", "llama3.1", TP2 | PP2),
            ("mixtral", "mixtral", EP2),
        ],
        range(2),
    ),
    ids=str,
)
def test_over_ranks(ranks, model, draft, layout):
    config = TIGHT if draft else dataclasses.replace(TIGHT, speculative=NGRAM)
    requests = [dataclasses.replace(request, n=2) for request in MIXED[::3]]
    want = words(answers(Engine(ours(model), config, draft=ours(draft) if draft else None), requests))
    world = 4 if len(layout) == 2 and "sequence_parallel" not in layout else 2
    models = [weights(name) for name in (model, draft) if name]
    first, *_ = ranks(world).run(speculated, models, layout, config, requests)
    assert first == {key: answer for key, (answer, _) in want.items()}


@pytest.mark.parametrize(
    "speculative, draft, words",
    [
        ({"method": "mtp"}, None, "heads of multi-token prediction are trained, and do not propose yet"),
        ({"method": "eagle"}, None, "speculative method 'eagle'"),
        ({"num_speculative_tokens": 0}, None, "num_speculative_tokens is 0"),
        ({"prompt_lookup_min": 5}, None, "prompt_lookup_min is 5 and prompt_lookup_max 4"),
        ({"method": "draft"}, None, "speculative method 'draft' without a draft model"),
        ({}, "gpt2", "speculative method 'ngram' with a draft model"),
        (None, "gpt2", "speculative method None with a draft model"),
        ({"method": "draft"}, "five", "a draft model of 5 words for a model of 99"),
        ({"method": "draft"}, "gpt2", "max_model_len is 256, and the draft model has 64 learned positions"),
        ({"num_speculative_tokens": 16}, None, "max_num_batched_tokens 512 for max_num_seqs 32 sequences with 16"),
    ],
)
def test_refusals(speculative, draft, words):
    models = {"five": five_words, "gpt2": lambda _: ours("gpt2")}
    with pytest.raises(ConfigError) as error:
        config = EngineConfig(speculative=None if speculative is None else SpeculativeConfig(**speculative))
        Engine(ours("mistral"), config, draft=models[draft](0) if draft else None)
    assert words in str(error.value)
