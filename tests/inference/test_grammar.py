"""Answers that a grammar bounds: valid, drawn from the model's own odds, and nobody else's business."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys

import jsonschema
import pytest
import torch

from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete
from minimegatron.inference.grammar import (
    Grammars,
    GrammarState,
    of_choice,
    of_json_schema,
    of_lark,
    of_regex,
    unpacked,
)
from minimegatron.inference.sampling import GREEDY, Rows, SamplingParams, sample, uniform
from minimegatron.inference.sequence import FinishReason, Request
from minimegatron.inference.speculative import SpeculativeConfig
from tests.inference.models import ours, weights
from tests.inference.ranked import VOCABULARY, Words, speculated
from tests.inference.test_speculative import answers, like, words
from tests.thorough import mostly_thorough

WORDS = Words()
GRAMMARS = Grammars(WORDS, VOCABULARY)
EOS = VOCABULARY - 4
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
TIGHT = EngineConfig(160, page_size=4, num_pages=22, max_num_seqs=14, max_num_batched_tokens=56)
NGRAM, DRAFT = SpeculativeConfig("ngram", 3, 3, 1), SpeculativeConfig("draft_model", 3)


def engine(config=TIGHT, speculative=None, name="mistral"):
    draft = like(name) if speculative is not None and speculative.method == "draft_model" else None
    config = dataclasses.replace(config, speculative=speculative)
    return Engine(ours(name), config, draft=draft, grammars=GRAMMARS)


def random_schema(dice, depth=2):
    kinds = ["boolean", "null", "integer", "enum", "string", "pattern", *["object", "array", "anyOf"] * (depth > 0)]
    kind = dice.choice(kinds)
    if kind == "integer":
        return {"type": kind, "minimum": dice.randint(-20, 0), "maximum": dice.randint(1, 300)}
    if kind == "enum":
        return {"enum": dice.sample(["a", "aé", "x y", '"', 7, -1.5, True, None, [1], {"k": "v"}], dice.randint(1, 4))}
    if kind == "string":
        return {"type": kind, "minLength": dice.randint(0, 1), "maxLength": dice.randint(1, 4)}
    if kind == "pattern":
        return {"type": "string", "pattern": dice.choice(["^[ab]{1,3}$", "^(x|yy)z$", "^[0-9]{2}:[0-5]$"])}
    if kind == "array":
        return {"type": kind, "items": random_schema(dice, depth - 1), "minItems": 1, "maxItems": dice.randint(1, 3)}
    if kind == "anyOf":
        return {kind: [random_schema(dice, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = dice.sample(["a", "bc", "é", 'q"'], dice.randint(1, 3))
        properties = {name: random_schema(dice, depth - 1) for name in names}
        required = [name for name in names if dice.random() < 0.7]
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


@pytest.mark.parametrize("speculative", mostly_thorough([None, NGRAM, DRAFT], [0, 1]), ids=["plain", "ngram", "draft"])
def test_answers_are_valid(speculative):
    """Of 24 random schemas, two answers each: with chunks, preemption, forks, pages found, blanks for some."""
    dice, requests, schemas = random.Random(4), [], []
    params = [GREEDY, SamplingParams(1.5), SamplingParams(1.0, 20, 0.9), SamplingParams(0.7, min_p=0.01)]
    no_blanks = tuple((WORDS.spelled.index(c), -100.0) for c in " ")
    for i in range(24):
        schemas.append({**random_schema(dice), **COMPACT} if i % 3 else random_schema(dice))
        sampling = dataclasses.replace(params[i % 4], logit_bias=no_blanks if i % 6 else ())
        prompt = tuple(dice.randint(0, 90) for _ in range(1 + 5 * (i % 4)))
        stops = frozenset([EOS]) if i % 2 else frozenset()
        requests.append(Request(prompt, 65, sampling, stops, seed=i, n=2, grammar=of_json_schema(schemas[-1])))
    made = engine(speculative=speculative)
    found = answers(made, requests)
    assert {sequence.reason for sequence in found.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
    whole = {key: sequence for key, sequence in found.items() if sequence.reason is FinishReason.STOP}
    assert len({i for i, _ in whole}) >= 22
    for (i, _), sequence in whole.items():
        jsonschema.validate(json.loads(WORDS.text(sequence.answer)), schemas[i])
    assert made.scheduler.preemptions > 0
    if speculative is not None:
        assert 0 < made.accepted_tokens < made.proposed_tokens


ODDS = {
    "type": "object",
    "properties": {
        "a": {"enum": ["", "a", "aé", "12", 12, 123, True]},
        "b": {"type": "array", "items": {"enum": [1, 12, "true"]}, "maxItems": 2},
    },
    "required": ["a"],
    "additionalProperties": False,
}


def documents():
    """All compact texts that keep to `ODDS`, by another judge: every value of a small universe that is valid."""
    leaves = ["", "a", "aé", "12", "b", 1, 12, 123, 2, True, False, None, "true"]
    lists = [list(some) for n in range(4) for some in itertools.product([1, 12, "true", 2], repeat=n)]
    values = [*leaves, *({"a": leaf} for leaf in leaves), *({"a": a, "b": b} for a in leaves for b in [*lists, 1])]
    valid = [value for value in values if jsonschema.Draft202012Validator(ODDS).is_valid(value)]
    return [json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() for value in valid]


def may_come(texts, begun):
    """Which words may follow the bytes of an answer; None where it is over."""
    if begun in texts and not any(text != begun and text.startswith(begun) for text in texts):
        return None
    spelled = [begun + WORDS.bytes_of(token) for token in range(EOS)]
    mask = [any(text.startswith(each) for text in texts) for each in spelled]
    return torch.tensor([*mask, begun in texts, False, False, False])


@torch.no_grad()
def by_brute_force(name, request, index, texts):
    """An answer: the whole model for every token, and every text for every mask."""
    model, tokens, scores, begun = ours(name), list(request.prompt), [], b""
    rows = Rows.of([request.sampling])
    while (mask := may_come(texts, begun)) is not None:
        logits = model.full_logits(torch.tensor([tokens]))[0, -1:]
        u = uniform(request.seed, index, len(tokens) - len(request.prompt))
        drawn = sample(logits.masked_fill(~mask, -math.inf), rows, torch.tensor([u], dtype=torch.float64)).item()
        tokens.append(drawn)
        scores.append((logits / request.sampling.temperature).log_softmax(-1)[0, drawn].item())
        if drawn == EOS:
            break
        begun += WORDS.bytes_of(drawn)
    return tokens[len(request.prompt) :], scores


@pytest.mark.slow
def test_answers_are_those_of_brute_force():
    """Which words may come, by all valid texts; words, log-probabilities and the end, whoever proposes or is beside."""
    texts, grammar = documents(), of_json_schema({**ODDS, **COMPACT})
    assert 50 < len(texts) < 200
    params = [GREEDY, SamplingParams(1.3), SamplingParams(0.8, 5, 0.9)]
    requests = [
        Request((5, 9, 3 + i), 60, params[i % 3], frozenset([EOS]), seed=i, n=2, log_probs=0, grammar=grammar)
        for i in range(12)
    ]
    want = {(i, j): by_brute_force("mistral", requests[i], j, texts) for i in range(12) for j in range(2)}
    assert len({tuple(tokens) for tokens, _ in want.values()}) > 8
    beside = [Request((7, 7, 7, i), 30, SamplingParams(), n=2, seed=99) for i in range(4)]
    for speculative in (None, NGRAM):
        found = answers(engine(speculative=speculative), [*requests, *beside], 3)
        for key, (tokens, scores) in want.items():
            assert found[key].answer == tokens and found[key].reason is FinishReason.STOP
            assert found[key].log_probs == pytest.approx(scores, abs=1e-5)
    greedy = [requests[i] for i in range(0, 12, 3)]
    made = engine(speculative=DRAFT)
    for (i, j), sequence in answers(made, greedy).items():
        assert sequence.answer == want[3 * i, j][0]
    assert made.accepted_tokens > 0


def test_every_mask_is_that_of_brute_force():
    """Also behind proposals, of which some cannot come, and after a way back."""
    texts, dice = documents(), random.Random(1)
    for _ in range(6):
        state, begun = GRAMMARS.begin(of_json_schema({**ODDS, **COMPACT})), b""
        while (mask := may_come(texts, begun)) is not None:
            assert not state.over
            assert torch.equal(unpacked([state.allowed((), [EOS], True)], VOCABULARY)[0], mask)
            proposed = [dice.choice(mask[:EOS].nonzero().flatten().tolist()), dice.randint(0, EOS - 1)]
            ahead = begun + WORDS.bytes_of(proposed[0])
            if (behind := may_come(texts, ahead)) is not None:
                assert torch.equal(unpacked([state.allowed(proposed[:1], [EOS], True)], VOCABULARY)[0], behind)
                behind[EOS] = behind[EOS] and not behind[:EOS].any()
                found = state.allowed(proposed[:1], [EOS], False)
                assert found is None or torch.equal(unpacked([found], VOCABULARY)[0], behind)
            possible = any(text.startswith(ahead + WORDS.bytes_of(proposed[1])) for text in texts)
            assert state.valid(proposed) == 1 + possible and (possible or state.allowed(proposed, [EOS], True) is None)
            begun = ahead
            state.take(proposed[0])
        assert state.over and begun in texts


def test_how_an_answer_ends():
    """By the grammar, by a stop id where it accepts, by its length; a stop id that is a word is one all along."""

    def answer(grammar, most=6, **more):
        (sequence,) = answers(engine(), [Request((5, 9, 3), most, grammar=grammar, **more)]).values()
        return WORDS.text(sequence.answer), sequence.reason, sequence.answer[-1]

    assert answer(of_choice(["<eos>"])) == ("<eos>", FinishReason.STOP, WORDS.spelled.index(">"))
    text, reason, _ = answer(of_regex("[0-9]+"), stop_ids=frozenset())
    assert len(text) >= 6 and reason is FinishReason.LENGTH
    to_the_end = SamplingParams(top_k=1, logit_bias=((EOS, 100.0),))
    assert answer(of_regex("[0-4]+"), sampling=to_the_end, stop_ids=frozenset([EOS]))[1:] == (FinishReason.STOP, EOS)
    text, *end = answer(of_regex("[0-4]+"), sampling=to_the_end, stop_ids=frozenset([EOS]), min_new_tokens=3)
    assert len(text) >= 3 and end == [FinishReason.STOP, EOS]
    assert answer(of_choice(["ab"]), stop_ids=frozenset([EOS]), min_new_tokens=5)[:2] == ("ab", FinishReason.STOP)
    a = WORDS.spelled.index("a"), len(WORDS.spelled) - 5
    assert answer(of_choice(["ab"]), stop_ids=frozenset(a))[:2] == ("a", FinishReason.STOP)
    assert answer(of_lark('start: "x" y\ny: "yy" | "z"'))[0] in ("xyy", "xz")


def test_a_parser_that_gives_up_ends_its_answer_alone(monkeypatch):
    """This vocabulary has no word for a part of the answer, which shows when all before it is there."""
    made = engine()
    with pytest.raises(DataError, match="the grammar's parser gave up"):
        complete(made, [Request((5, 9), 9, grammar=of_choice(["ab\u20ac"])), Request((5, 9), 9)])
    assert not made.has_work and made.scheduler.blocks.available == made.scheduler.blocks.capacity
    nothing = property(lambda self: "too much")
    monkeypatch.setattr(GrammarState, "failure", nothing)
    made.grammars = Grammars(WORDS, VOCABULARY)
    with pytest.raises(ConfigError, match="the grammar cannot be read: too much"):
        complete(made, [Request((5, 9), 9, grammar=of_choice(["ab"]))])


@pytest.mark.parametrize(
    "grammar, words",
    [
        (of_json_schema({"type": "foo"}), "Invalid type: foo"),
        (of_json_schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (of_json_schema({"contains": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["contains"]'),
        (of_regex("("), "unclosed group"),
        (of_lark("start: x"), 'unknown name: "x"'),
        (of_choice(["\u20ac"]), "the grammar cannot be read"),
    ],
)
def test_grammars_that_are_none(grammar, words):
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            engine().add_request(Request((5,), 4, grammar=grammar), "a")
        assert words in str(error.value)


def test_without_the_package_or_the_words(monkeypatch):
    with pytest.raises(ConfigError, match="an engine that reads none"):
        Engine(ours("mistral")).add_request(Request((5,), 4, grammar="{}"), "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'minimegatron\[structured\]'"):
        Grammars(WORDS, VOCABULARY).check(of_json_schema({}))


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    "layout, draft", mostly_thorough([(TP2, False), (PP2, True), (PP2, False), (TP2, True)], range(2), [0]), ids=str
)
def test_over_ranks(ranks, layout, draft):
    grammar = of_json_schema({**ODDS, **COMPACT})
    params = [GREEDY, SamplingParams(0.8, 5, 0.9)]
    requests = [Request((5, 9, i), 40, params[i % 2], seed=i, n=2, grammar=grammar) for i in range(4)]
    config = dataclasses.replace(TIGHT, speculative=DRAFT if draft else NGRAM)
    models = [weights(name) for name in ("llama2", *["llama3.1"] * draft)]
    first, *_ = ranks(2).run(speculated, models, layout, config, requests, WORDS)
    alone = Engine(ours("llama2"), config, draft=ours("llama3.1") if draft else None, grammars=GRAMMARS)
    assert first == {key: answer for key, (answer, _) in words(answers(alone, requests)).items()}
