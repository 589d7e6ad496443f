"""A recorded step, without a GPU: the places it reads, and that no host decides anything between two kernels.

The recorder (`tests/recorder.py`) plays a step by running it again on the same places, under a mode that refuses
whatever would make a host wait for numbers: that is what a recording on a GPU refuses as well.
"""

from __future__ import annotations

import shlex

import pytest
import torch

from minimegatron.errors import ConfigError, DataError
from minimegatron.training import graphs
from minimegatron.training.arguments import parse_args
from minimegatron.training.graphs import StepGraph
from tests.mock_data import small_trainer
from tests.recorder import OnACpu
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import TINY

LINE = f"{TINY} --mock-data --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4 "
LINE += "--train-iters 4"


def history(line: str, graph: StepGraph | None = None, world: int = 1) -> list[tuple[float, float | None]]:
    trainer = small_trainer(parse_args(shlex.split(f"{LINE} {line}"), world), quiet=True)
    trainer.graph = graph
    trainer.train()
    trainer.close()
    return [(report.losses["lm loss"], report.grad_norm) for report in trainer.history]


@pytest.mark.parametrize(
    "line",
    mostly_thorough(
        [
            "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max --bf16",
            "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16",
            "--fp8-format e4m3 --fp8-recipe mxfp8",
            "",
        ],
        [0, 1],
        [1],
    ),
    ids=["delayed", "llama", "mxfp8", "gpt"],
)
def test_a_recorded_step_is_the_step(line):
    recorder = OnACpu(places=False)
    assert history(line, StepGraph(1, recorder)) == history(line)
    assert recorder.events == ["warm", "record"] + ["play"] * 3


def recorded_and_not(rank: int, world: int, line: str) -> bool:
    """Whether a replica that plays its steps has the losses and norms of one that computes them."""
    return history(line, StepGraph(1, OnACpu(places=False)), world) == history(line, world=world)


@SLOW
@pytest.mark.parametrize("line", ["", "--use-distributed-optimizer"], ids=["no_shard", "optim"])
def test_replicas_play_their_steps(ranks, line):
    """Gradients travel after the passes and new weights after the step, so a recording of the passes has neither."""
    assert ranks(2).run(recorded_and_not, line) == [True, True]


def test_batches_have_one_place_and_results_are_the_steps_own(monkeypatch):
    places = set()

    def passes(forward_step, batches, model, num_microbatches, scale):
        read = [next(batches)["tokens"] for _ in range(num_microbatches)]
        places.update(x.data_ptr() for x in read)
        total = torch.stack([x.sum() for x in read]).sum()
        return total.double(), {"lm loss": torch.stack([total, total]).double()}

    monkeypatch.setattr(graphs, "forward_backward", passes)
    graph = StepGraph(1, OnACpu(places=False))
    steps = [[{"tokens": torch.full((2, 3), float(2 * i + j))} for j in range(2)] for i in range(4)]
    results = [graph(None, iter(step), None, 2, None) for step in steps]
    assert [tokens.item() for tokens, _ in results] == [6.0, 30.0, 54.0, 78.0]
    assert [reports["lm loss"][0].item() for _, reports in results] == [6.0, 30.0, 54.0, 78.0]
    assert len(places) == 2


def test_another_shape_is_refused():
    graph = StepGraph(9, OnACpu(places=False))
    graph._take([{"tokens": torch.zeros(2, 3)}])
    for other in ({"tokens": torch.zeros(2, 4)}, {"tokens": torch.zeros(2, 3).long()}, {"labels": torch.zeros(2, 3)}):
        with pytest.raises(DataError, match="batches of one shape"):
            graph._take([other])
    with pytest.raises(DataError):
        graph._take([{"tokens": torch.zeros(2, 3)}] * 2)


@pytest.mark.parametrize(
    "line, words",
    [
        ("--enable-cuda-graph", "a recording of launches on a GPU"),
        ("--cuda-graph-impl transformer_engine", "one of 'none', 'local'"),
        ("--enable-cuda-graph --overlap-grad-reduce --recompute-activations", "recompute_granu, overlap_grad_reduce"),
    ],
)
def test_refusals(line, words):
    with pytest.raises(ConfigError) as caught:
        history(line)
    assert all(word in str(caught.value) for word in words.split(", "))
