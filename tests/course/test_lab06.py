"""Lab 06's checks: what the judge takes for right, beside the package; programs that are ZeRO by name only."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from labkit.exercises import Draw
from labkit.fresh import Nursery
from minimegatron.parallel.buckets import BucketSpan, BufferLayout, Span
from minimegatron.viz.zero_stages import bytes_per_parameter
from tests.course.marked import LABS, said

MARKED = LABS["06_data_parallel_zero"]
LAB = MARKED.lab


def drawn(exercise, seed):
    """The inputs of the first hidden case."""
    return next(case.inputs(Draw(seed)) for case in LAB[exercise].cases if case.hidden)


@pytest.mark.parametrize("seed", range(3))
def test_the_pieces_are_those_of_the_package(seed):
    inputs = drawn("my_pieces", seed)
    spans = tuple(Span(place, place + n) for place, n in zip(inputs["places"], inputs["numels"], strict=True))
    buckets = tuple(
        BucketSpan(Span(start, stop), stop - start, tuple(i for i in reversed(range(len(spans)))
                   if start <= spans[i].start < stop))
        for start, stop in inputs["buckets"]
    )  # fmt: skip
    layout = BufferLayout(spans, buckets, inputs["ranks"])
    for rank in range(inputs["ranks"]):
        pieces = layout.pieces(rank)
        assert LAB["my_pieces"].reference(**{**inputs, "rank": rank}) == [
            (p.param, p.of_param.start, p.of_param.stop, p.bucket, p.of_shard.start) for p in pieces
        ]


def test_bytes_that_are_held_are_those_that_the_package_predicts():
    each = {"weights": 2, "gradients": 4, "optimizer state": 12}
    for stage in range(4):
        mine = LAB["bytes_held"].reference(1, 8, stage, weight=2, gradient=4, optimizer=12)
        assert Fraction(sum(mine.values())) == bytes_per_parameter(stage, 8, each)


@pytest.mark.parametrize("seed", range(2))
def test_the_judges_adamw_is_torchs(seed):
    """One process with all shards; weight decay by element as two groups."""
    ranks = drawn("sharded_adamw", seed)
    weights, decay = ranks[0]["weights"].double(), torch.zeros(len(ranks[0]["weights"]), dtype=torch.bool)
    for part, r in zip(decay.chunk(len(ranks)), ranks, strict=True):
        for start, stop in r["decay"]:
            part[start:stop] = True
    halves = [weights[decay].clone().requires_grad_(), weights[~decay].clone().requires_grad_()]
    hyper = {name: ranks[0][name] for name in ("lr", "betas", "eps")}
    groups = [
        {"params": [half], "weight_decay": w} for half, w in zip(halves, (ranks[0]["weight_decay"], 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, **hyper)
    for step, want in enumerate(LAB["sharded_adamw"].reference(ranks)[0]):
        grad = torch.cat([r["grads"][step] for r in ranks]).double()
        halves[0].grad, halves[1].grad = grad[decay], grad[~decay]
        optimizer.step()
        whole = weights.clone()
        whole[decay], whole[~decay] = (half.detach() for half in halves)
        torch.testing.assert_close(whole.float(), want)


PRETENDERS = [
    ("sharded_adamw edit 1", "room for two moments of its own shard"),
    ("gather_on_use edit 3", "weights that were let go of"),
    ("gather_on_use edit 4", "still alive"),
    ("gather_on_use edit 5", "one is enough"),
    ("reduce_early edit 1", "calls all_reduce"),
    ("reduce_early edit 2", "inside backward()"),
    ("clip edit 1", "norm of its own shards"),
]


@pytest.mark.parametrize(("name", "words"), PRETENDERS)
def test_what_is_zero_by_name_only_is_told_so(nursery: Nursery, name: str, words: str) -> None:
    answer = next(one for one in MARKED.answers if one.name == name and not one.right)
    verdict = MARKED.check(nursery, answer.exercise, answer.source)
    assert verdict.state == "wrong" and words in said(verdict), verdict
