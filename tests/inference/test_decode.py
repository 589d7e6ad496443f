"""A recorded decode step, without a GPU: same words, same places, and a host that has nothing to say in between."""

from __future__ import annotations

import itertools

import pytest
import torch

from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.errors import ConfigError
from minimegatron.inference import generate as decode
from minimegatron.inference.generate import WARMUP_STEPS, DecodeStep, StaticEngine
from minimegatron.inference.sampling import GREEDY, SamplingParams
from tests.inference.models import ours, weights
from tests.inference.ranked import PROMPTS, unrecordable
from tests.recorder import OnACpu
from tests.thorough import mostly_thorough

SAMPLED = SamplingParams(0.8, 20, 0.95)


def words(continuations):
    return [c.tokens for c in continuations]


@pytest.mark.parametrize(
    "name, params",
    mostly_thorough(itertools.product(["gpt2", "mistral", "qwen3", "llama3.1"], [GREEDY, SAMPLED]), [0, 3]),
)
def test_played_is_computed(name, params):
    recorder = OnACpu()
    engine = StaticEngine(ours(name), 40, recorder)
    plain = StaticEngine(ours(name), 40)
    for seed, prompts in ((1, PROMPTS), (2, PROMPTS[::-1])):
        played, computed = (e.generate(prompts, 12, params, seed=seed) for e in (engine, plain))
        assert words(played) == words(computed)
        for a, b in zip(played, computed, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-6)
    assert recorder.events == ["warm"] * WARMUP_STEPS + ["record"] + ["play"] * (2 * 11 - WARMUP_STEPS)


def test_with_the_same_shapes_not_a_bit_differs(monkeypatch):
    """What differs above by rounding is that the plain step reads fewer rows."""
    run = DecodeStep._run
    played = StaticEngine(ours("mistral"), 40, OnACpu()).generate(PROMPTS, 12, SAMPLED)
    monkeypatch.setattr(DecodeStep, "_run", lambda self, key_length=None: run(self))
    assert played == StaticEngine(ours("mistral"), 40).generate(PROMPTS, 12, SAMPLED)


def test_another_batch_or_another_way_to_draw_has_a_recording_of_its_own():
    recorder = OnACpu()
    engine = StaticEngine(ours("mistral"), 40, recorder)
    for prompts, params in ((PROMPTS, GREEDY), (PROMPTS[:2], GREEDY), (PROMPTS, SAMPLED), (PROMPTS, GREEDY)):
        engine.generate(prompts, 7, params)
    assert recorder.events.count("record") == 3


def test_stops_are_looked_for_rarely_and_change_nothing():
    plain = StaticEngine(ours("mistral"), 64)
    stop = plain.generate(PROMPTS[:1], 40, SAMPLED)[0].tokens[20:21]
    recorder = OnACpu()
    engine = StaticEngine(ours("mistral"), 64, recorder)
    played, computed = (e.generate(PROMPTS[:1], 40, SAMPLED, stop_ids=stop) for e in (engine, plain))
    assert played[0].tokens == computed[0].tokens and played[0].stopped and len(played[0].tokens) <= 21
    assert len(recorder.events) - 1 in (15, 31), "looked after 16 and 32 tokens, and at no other time"


def waiting(run):
    """A step that asks the device whether it is done."""
    return lambda self, key_length=None: (self.tokens.sum().item(), run(self))[1]


def elsewhere(run):
    """A step that keeps its newest tokens in a new tensor each time."""

    def step(self, key_length=None):
        words, log_probs = run(self)
        self.tokens = words.clone()
        return self.tokens, log_probs

    return step


def counting(run):
    """A step whose shapes grow with a number that the host counts."""

    def step(self, key_length=None):
        self.count = getattr(self, "count", 8) + 1
        return run(self, self.count)

    return step


@pytest.mark.parametrize(
    "mistake, words",
    [
        (waiting, "makes the host wait"),
        (elsewhere, "not where it was recorded"),
        (counting, "the host decided otherwise"),
    ],
)
def test_what_a_graph_would_get_wrong_is_seen(monkeypatch, mistake, words):
    monkeypatch.setattr(DecodeStep, "_run", mistake(DecodeStep._run))
    with pytest.raises(AssertionError, match=words):
        StaticEngine(ours("mistral"), 40, OnACpu()).generate(PROMPTS, 8)


def test_the_step_is_one_graph_for_torch_compile(monkeypatch):
    """Traced as a whole, without a break, and the same words; what fuses kernels after that is torch's own."""
    monkeypatch.setattr(decode, "compile_whole", lambda run: torch.compile(run, fullgraph=True, backend="aot_eager"))
    compiled, plain = StaticEngine(ours("mistral"), 24, compiled=True), StaticEngine(ours("mistral"), 24)
    assert words(compiled.generate(PROMPTS, 8, SAMPLED)) == words(plain.generate(PROMPTS, 8, SAMPLED))


@pytest.mark.thorough
def test_compiled_is_computed():
    compiled, plain = StaticEngine(ours("mistral"), 24, compiled=True), StaticEngine(ours("mistral"), 24)
    with torch._inductor.config.patch(compile_threads=1):  # more would stay behind, waiting for work
        found = compiled.generate(PROMPTS, 8, SAMPLED)
    assert words(found) == words(plain.generate(PROMPTS, 8, SAMPLED))


def test_refusals(ranks):
    with pytest.raises(ConfigError, match="how many tokens each of its 8 experts has got"):
        StaticEngine(ours("mixtral"), 16, OnACpu())
    with pytest.raises(ConfigError, match="compiled decode step with a MoELayer"):
        StaticEngine(ours("mixtral"), 16, compiled=True)
    with pytest.raises(ConfigError, match="a CUDA graph on a cpu"):
        CudaRecorder(torch.device("cpu"))
    for said in ranks(2).run(unrecordable, weights("llama2")):
        assert said.startswith("ConfigError: a recorded or compiled decode step with tp = 2")
