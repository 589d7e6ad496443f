"""A recorded decode step, without a GPU: same words, same places, and a host that has nothing to say in between."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.errors import ConfigError
from minimegatron.inference import runner
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.inference.runner import WARMUP_STEPS, RecordedStep
from minimegatron.inference.sampling import GREEDY, SamplingParams
from tests.inference.models import ours, weights
from tests.inference.ranked import PROMPTS, unrecordable
from tests.recorder import OnACpu
from tests.thorough import SLOW, mostly_thorough

SHORT = EngineConfig(max_model_len=40)
SAMPLED = SamplingParams(0.8, 20, 0.95)


def words(continuations):
    return [c.tokens for c in continuations]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, params",
    mostly_thorough(itertools.product(["gpt2", "mistral", "qwen3", "llama3.1", "mamba2"], [GREEDY, SAMPLED]), [0, 3]),
)
def test_played_is_computed(name, params):
    """Three sequences in a recording of four; prompts are computed as they come."""
    recorder = OnACpu()
    engine = Engine(ours(name), SHORT, recorder=recorder)
    plain = Engine(ours(name), SHORT)
    for seed, prompts in ((1, PROMPTS), (2, PROMPTS[::-1])):
        played, computed = (generate(e, prompts, 12, params, seed=seed) for e in (engine, plain))
        assert words(played) == words(computed)
        for a, b in zip(played, computed, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)  # batches of other sizes add in another order
    assert recorder.events == ["warm"] * WARMUP_STEPS + ["record"] + ["play"] * (2 * 11 - WARMUP_STEPS)


def test_another_power_of_two_or_another_way_to_draw_has_a_recording_of_its_own():
    recorder = OnACpu()
    engine = Engine(ours("mistral"), SHORT, recorder=recorder)
    for prompts, params in (
        (PROMPTS, GREEDY),
        (PROMPTS[:2], GREEDY),
        (PROMPTS, SAMPLED),
        (PROMPTS + PROMPTS[:1], GREEDY),
    ):
        generate(engine, prompts, 7, params)
    assert recorder.events.count("record") == 3
    warmer = SamplingParams(1.5, 5, 0.5)
    assert words(generate(engine, PROMPTS, 9, warmer)) == words(
        generate(Engine(ours("mistral"), SHORT), PROMPTS, 9, warmer)
    )
    assert recorder.events.count("record") == 3, "other parameters are other numbers in the same recording"


def waiting(run):
    """A step that asks the device whether it is done."""
    return lambda self: (self.tokens.sum().item(), run(self))[1]


def elsewhere(run):
    """A step that keeps its newest tokens in a new tensor each time."""

    def step(self):
        found = run(self)
        self.tokens = found[0].clone()[None]
        return found

    return step


def counting(run):
    """A step whose shapes grow with a number that the host counts."""

    def step(self):
        self.count = getattr(self, "count", 3) + 1
        whole = self.context
        self.context = dataclasses.replace(whole, page_table=whole.page_table[:, : 1 + self.count // 4])
        found = run(self)
        self.context = whole
        return found

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
    monkeypatch.setattr(RecordedStep, "_step", mistake(RecordedStep._step))
    with pytest.raises(AssertionError, match=words):
        generate(Engine(ours("mistral"), EngineConfig(max_model_len=96), recorder=OnACpu()), PROMPTS, 24)


@SLOW
def test_the_step_is_one_graph_for_torch_compile(monkeypatch):
    """Traced as a whole, without a break, and the same words; what fuses kernels after that is torch's own."""
    monkeypatch.setattr(runner, "compile_whole", lambda run: torch.compile(run, fullgraph=True, backend="aot_eager"))
    compiled, plain = Engine(ours("mistral"), SHORT, compiled=True), Engine(ours("mistral"), SHORT)
    assert words(generate(compiled, PROMPTS, 8, SAMPLED)) == words(generate(plain, PROMPTS, 8, SAMPLED))


@pytest.mark.thorough
def test_compiled_is_computed():
    compiled, plain = Engine(ours("mistral"), SHORT, compiled=True), Engine(ours("mistral"), SHORT)
    with torch._inductor.config.patch(compile_threads=1):  # more would stay behind, waiting for work
        found = generate(compiled, PROMPTS, 8, SAMPLED)
    assert words(found) == words(generate(plain, PROMPTS, 8, SAMPLED))


@pytest.mark.slow
def test_refusals(ranks):
    with pytest.raises(ConfigError, match="how many tokens each of its 8 experts has got"):
        Engine(ours("mixtral"), recorder=OnACpu())
    with pytest.raises(ConfigError, match="compiled decode step with a MoELayer"):
        Engine(ours("mixtral"), compiled=True)
    with pytest.raises(ConfigError, match="a CUDA graph on a cpu"):
        CudaRecorder(torch.device("cpu"))
    for said in ranks(2).run(unrecordable, weights("llama2")):
        assert said.startswith("ConfigError: a recorded or compiled decode step with tp = 2")
