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
from minimegatron.inference.plan import plan_draft
from minimegatron.inference.sampling import GREEDY, Rows, SamplingParams, distribution, draw, uniform
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import FinishReason, Request
from minimegatron.inference.speculative import DraftLength, NGrams, SpeculativeConfig, verified
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.param import logical_parameters
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.inference.models import NAMES, ours, weights
from tests.inference.ranked import PROMPTS, build, speculated
from tests.inference.test_sampling import RARE
from tests.recorder import OnACpu
from tests.thorough import SLOW, mostly_thorough

SAMPLED = SamplingParams(0.8, 20, 0.95)
NGRAM = SpeculativeConfig("ngram", 3, 3, 1)
DRAFT = SpeculativeConfig("draft_model", 3)
MTP = SpeculativeConfig("mtp", 2)
P, Q = torch.tensor([1.0, 0.4, -0.3, 0.0, -2.0]), torch.tensor([-0.5, 1.1, 0.6, 0.2, -1.0])


@functools.cache
def like(name, noise=0.02):
    """A model that mostly agrees with `ours(name)`."""
    config, tensors = weights(name)
    generator = torch.Generator().manual_seed(1)
    return build(config, {key: t + noise * torch.randn(t.shape, generator=generator) for key, t in tensors.items()})


@functools.cache
def with_depths(seed, vocab_size=99, **fields):
    """A model with two depths of multi-token prediction that often agree with it: its own layer is in them."""
    h = 32
    sizes = {"num_layers": 1, "hidden_size": h, "num_attention_heads": 4, "ffn_hidden_size": 64, "mtp_num_layers": 2}
    config = family_config("llama", **sizes, vocab_size=vocab_size, max_position_embeddings=256, **fields)
    model = build_model(config.replace(init_method_std=0.3), Mesh.serial(), seed).eval()
    with torch.no_grad():
        for depth in model.mtp.layers:
            depth.transformer_layer.load_state_dict(model.layers[0].state_dict())
            depth.eh_proj.weight[:, :h] = 0.3 * torch.eye(h)
            depth.eh_proj.weight[:, h:] *= 0.1
    return model


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


@SLOW
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_answers_are_distributed_as_the_model_says(method):
    """All 125 answers of three words, of which the last two are proposed: chi-squared over those that are likely."""
    model, draft = (five_words(0), five_words(1)) if method == "draft_model" else (with_depths(0, 5), None)
    n, prompt, params = 2000, (1, 4), SamplingParams(1.2, top_p=0.9)
    config = EngineConfig(
        page_size=4, max_num_seqs=n, max_num_batched_tokens=4 * n, speculative=SpeculativeConfig(method, 2)
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


@pytest.mark.parametrize("config", mostly_thorough([NGRAM, DRAFT, MTP], [0, 2], [0]), ids=lambda config: config.method)
def test_greedy_words_of_200_prompts(config):
    requests = [Request(tuple(prompt), 5 + i % 11, log_probs=2) for i, prompt in enumerate(prompts(200))]
    draft = like("mistral") if config.method == "draft_model" else None
    engine = Engine(target(config), EngineConfig(max_model_len=40, speculative=config), draft=draft)
    found, want = answers(engine, requests), plain_answers(target(config))
    assert words(found) == words(want)
    assert 0 < engine.accepted_tokens < engine.proposed_tokens
    for key, sequence in found.items():
        assert sequence.log_probs == pytest.approx(want[key].log_probs, abs=1e-5)
        assert [[i for i, _ in top] for top in sequence.top] == [[i for i, _ in top] for top in want[key].top]


def target(config):
    """The model that a method speeds up."""
    return with_depths(0) if config.method == "mtp" else ours("mistral")


@functools.cache
def plain_answers(model):
    requests = [Request(tuple(prompt), 5 + i % 11, log_probs=2) for i, prompt in enumerate(prompts(200))]
    return answers(Engine(model, EngineConfig(max_model_len=40)), requests)


WITHOUT_STATES = [name for name in NAMES if name not in ("mamba2", "nemotron_h", "qwen3_next")]


@pytest.mark.parametrize("name", mostly_thorough(WITHOUT_STATES, lambda name: name == "deepseek_v3"))
def test_greedy_words_of_every_family(name):
    requests = [Request(tuple(prompt), 12) for prompt in prompts(24)]
    want = words(answers(Engine(ours(name), EngineConfig(40)), requests))
    for config, draft in ((NGRAM, None), (DRAFT, like(name))):
        engine = Engine(ours(name), EngineConfig(40, speculative=config), draft=draft)
        assert words(answers(engine, requests)) == want and engine.proposed_tokens > 0


@SLOW
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


def by_the_depths(model, tokens, count, drawn):
    """What the depths propose behind a text, in one pass over all of it, as in training: a proposal a depth."""
    tokens, found = list(tokens), []
    places = torch.arange(len(tokens) - 1)[None]
    context = AttentionContext(model.rotary(places))
    hidden = model.decoder(model.embedding(torch.tensor([tokens[:-1]]), places), context)
    for depth in model.mtp.layers[:count]:
        seen = torch.tensor([tokens[1 + len(found) :]])
        hidden = depth(hidden, model.embedding(seen, places), context)
        found.append(drawn(model.logits(hidden)[-1, :, : model.config.vocab_size], len(tokens)))
        tokens.append(found[-1])
    return found


def by_the_draft(draft, tokens, count, drawn):
    """What a draft model proposes behind a text, of which it computes all for every token."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(drawn(draft.full_logits(torch.tensor([tokens]))[0, -1:], len(tokens)))
    return tokens[len(tokens) - count :]


@SLOW
@pytest.mark.parametrize("method", ["depths", "draft"])
def test_proposals_are_those_of_a_pass_over_all_tokens(method, monkeypatch):
    """In every step: after rejections and pauses, preemption, in forks, from pages of others, in chunks."""
    if method == "depths":
        model, draft, config, check = with_depths(0), None, MTP, by_the_depths
    else:
        model, draft, config, check = ours("mistral"), like("mistral", 0.1), DRAFT, by_the_draft
    checked, lags, verified = 0, set(), Engine._verified

    @torch.no_grad()
    def checks(engine, chunk, *rest):
        nonlocal checked
        sequence, request = chunk.sequence, chunk.sequence.request

        def drawn(logits, length):
            u = uniform(request.seed, sequence.index, length - sequence.prompt_length, ":proposal")
            shares = distribution(logits, Rows.of([request.sampling]))
            return draw(shares, torch.tensor([u], dtype=torch.float64)).item()

        want = check(draft or model, sequence.tokens, len(sequence.proposed), drawn)
        assert sequence.proposed == want and len(want) == chunk.proposals > 0
        checked += 1
        return verified(engine, chunk, *rest)

    def planned(step, number, heads):
        lags.update(chunk.sequence.lag for chunk in step.chunks)
        return plan_draft(step, number, heads)

    monkeypatch.setattr(Engine, "_verified", checks)
    monkeypatch.setattr("minimegatron.inference.engine.plan_draft", planned)
    engine = Engine(model, dataclasses.replace(TIGHT, speculative=config), draft=draft)
    for _ in range(2):
        answers(engine, MIXED, 2)
    assert engine.scheduler.preemptions > 5 and engine.scheduler.blocks.hits > 50
    assert checked > 100 and 0 < engine.accepted_tokens < engine.proposed_tokens
    assert max(lags) > 1 if method == "draft" else lags == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, noise",
    mostly_thorough([(DRAFT, 0.2), (MTP, 0), (DRAFT, 0.02)], range(2), [0]),
    ids=["a bad draft", "depths", "a good draft"],
)
def test_with_a_seed_neighbours_and_memory_change_nothing(method, noise):
    """Nor do they change how many tokens are proposed, also where pauses are made."""
    tight = dataclasses.replace(TIGHT, speculative=method)
    roomy = dataclasses.replace(tight, num_pages=None, max_num_batched_tokens=512, enable_prefix_caching=False)
    model, draft = target(method), like("mistral", noise) if method is DRAFT else None
    alone = {}
    for i, request in enumerate(MIXED):
        engine = Engine(model, roomy, draft=draft)
        alone |= {(i, index): word for (_, index), word in words(answers(engine, [request])).items()}
    engine = Engine(model, tight, draft=draft)
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


@SLOW
def test_what_is_never_accepted_is_hardly_proposed():
    """The proposer is asked less and less, computes nothing in a pause, and is asked as ever once it is right again."""
    length, asked = DraftLength(8), []
    for tokens in range(1, 200):
        asked.append(length.count(tokens))
        if asked[-1]:
            length.told(0, tokens + 1)
    assert [count for count in asked if count] == [8, 4, 2, *[1] * 8]
    gaps = "".join("0" if count else "1" for count in asked).split("0")
    assert [len(gap) for gap in gaps[1:-1]] == [0, 1, 3, 7, 15, 31, 31, 31, 31, 31][: len(gaps) - 2]
    length.told(1, 300)
    assert length.count(300) == 8
    engine = Engine(ours("mistral"), EngineConfig(256, speculative=DRAFT), draft=contrary("mistral"))
    runs, run = [], engine.runner.run
    engine.runner.run = lambda batch: runs.append(batch.draft) or run(batch)
    requests = [Request((5, 9, i), 100) for i in range(8)]
    found = answers(engine, requests)
    assert words(found) == words(answers(Engine(ours("mistral"), EngineConfig(256)), requests))
    assert engine.proposed_tokens < 0.25 * engine.drawn_tokens and len(runs) < 1.7 * engine.steps


@functools.cache
def contrary(name):
    """A draft model that never agrees with `ours(name)`: the most likely word is what it finds least likely."""
    config, tensors = weights(name)
    return build(config, {**tensors, "output_layer.weight": -5 * tensors["output_layer.weight"]})


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


def test_steps_of_depths_are_not_recorded():
    with pytest.raises(ConfigError, match='"mtp" with recorded or compiled steps'):
        Engine(with_depths(0), EngineConfig(40, speculative=MTP), recorder=OnACpu())


def test_a_step_with_proposals_is_not_recorded():
    recorder, requests = OnACpu(), [Request((5, 9, 3, 7), 16), Request((1, 2), 16)]
    engine = Engine(ours("mistral"), EngineConfig(40, speculative=NGRAM), recorder=recorder)
    assert words(answers(engine, requests)) == words(answers(Engine(ours("mistral"), EngineConfig(40)), requests))
    assert "record" in recorder.events and engine.proposed_tokens > 0 and len(recorder.events) < engine.steps


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2, DEPTHS = {"expert_model_parallel_size": 2}, "two depths"


def two_layers_with_depths():
    """One for each stage, and tied ends."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "mtp_num_layers": 2}
    config = family_config("llama", **sizes, vocab_size=128, untie_embeddings_and_output_weights=False)
    return build_model(config.replace(init_method_std=0.3), Mesh.serial(), 3).eval()


@SLOW
@pytest.mark.parametrize(
    "model, draft, layout",
    mostly_thorough(
        [
            ("llama2", "llama3.1", TP2 | {"sequence_parallel": True}),
            ("llama2", "llama3.1", PP2),
            ("llama2", None, PP2),
            ("llama2", "llama3.1", TP2 | PP2),
            ("mixtral", "mixtral", EP2),
            (DEPTHS, None, TP2 | {"sequence_parallel": True}),
            (DEPTHS, None, PP2),
            (DEPTHS, None, TP2 | PP2),
            (DEPTHS, None, TP2),
        ],
        (0, 6),
    ),
    ids=str,
)
def test_over_ranks(ranks, model, draft, layout):
    config = TIGHT if draft else dataclasses.replace(TIGHT, speculative=MTP if model is DEPTHS else NGRAM)
    requests = [dataclasses.replace(request, n=2) for request in MIXED[::3]]
    built = two_layers_with_depths() if model is DEPTHS else ours(model)
    want = words(answers(Engine(built, config, draft=ours(draft) if draft else None), requests))
    world = 4 if len(layout) == 2 and "sequence_parallel" not in layout else 2
    models = [weights(name) for name in (model, draft) if name and name is not DEPTHS]
    if model is DEPTHS:
        models = [(built.config, {name: param.detach() for name, param in logical_parameters(built)})]
    first, *_ = ranks(world).run(speculated, models, layout, config, requests)
    assert first == {key: answer for key, (answer, _) in want.items()}


@pytest.mark.parametrize(
    "speculative, draft, words",
    [
        ({"method": "mtp"}, None, "num_speculative_tokens is 3, and the model has 0 depths of multi-token prediction"),
        ({"method": "eagle"}, None, "speculative method 'eagle'"),
        ({"num_speculative_tokens": 0}, None, "num_speculative_tokens is 0"),
        ({"prompt_lookup_min": 5}, None, "prompt_lookup_min is 5 and prompt_lookup_max 4"),
        ({"method": "draft_model"}, None, "speculative method 'draft_model' without a draft model"),
        ({}, "gpt2", "speculative method 'ngram' with a draft model"),
        (None, "gpt2", "speculative method None with a draft model"),
        ({"method": "draft_model"}, "five", "a draft model of 5 words for a model of 99"),
        ({"method": "draft_model"}, "gpt2", "max_model_len is 256, and the draft model has 64 learned positions"),
        ({"num_speculative_tokens": 16}, None, "max_num_batched_tokens 512 for max_num_seqs 32 sequences with 16"),
    ],
)
def test_refusals(speculative, draft, words):
    models = {"five": five_words, "gpt2": lambda _: ours("gpt2")}
    with pytest.raises(ConfigError) as error:
        config = EngineConfig(speculative=None if speculative is None else SpeculativeConfig(**speculative))
        Engine(ours("mistral"), config, draft=models[draft](0) if draft else None)
    assert words in str(error.value)
