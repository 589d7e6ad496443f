"""Lab 06's checks: what the judge takes for right, beside the package; programs that are ZeRO by name only."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from course.figures.data_parallel import SHARED_FROM, gather_timelines
from labkit.exercises import Draw
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout, Span
from tests.course.cells_on_ranks import run, saved
from tests.course.marked import LABS

MARKED = LABS["06_data_parallel_zero"]
LAB = MARKED.lab
FORMS = [" edit 1", " edit 2"]  # right ones: lists of parts; a view by ranks, or buckets in their order


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
        want = sum(Fraction(n, 8 if stage >= SHARED_FROM[kind] else 1) for kind, n in each.items())
        assert Fraction(sum(mine.values())) == want


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
    for step, want in enumerate(LAB["sharded_adamw"].reference(ranks)[0].values()):
        grad = torch.cat([r["grads"][step] for r in ranks]).double()
        halves[0].grad, halves[1].grad = grad[decay], grad[~decay]
        optimizer.step()
        whole = weights.clone()
        whole[decay], whole[~decay] = (half.detach() for half in halves)
        torch.testing.assert_close(whole.float(), want)


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lab06")
    saved("06_data_parallel_zero", folder)
    return folder


@pytest.mark.thorough  # the solution's notebook prints the same in an ordinary run
def test_the_lab_counts_the_bytes_that_it_predicts(cells: Path) -> None:
    """What a rank asks for is what `bytes_sent` says, but for padding; with 4 + 4 bytes stages send 1, 1, 1, 1.5."""
    (found, *_), printed = run(cells, "wire_bytes", 4)
    assert len(found) == 5 + 2 * 5
    for (_, name, _), (predicted, counted) in found.items():
        padding = 0 if name in ("stage 0", "FSDP2") else 2e-3 * predicted
        assert 0 <= counted - predicted <= padding, (name, predicted, counted)
    sent = {name: found[4, name, 1][1] / found[4, "stage 0", 1][1] for _, name, _ in found}
    assert [f"{sent[f'stage {stage}']:.2f}" for stage in range(3)] == ["1.00", "1.00", "1.00"]
    assert 1.4 < sent["stage 3"] < 1.5 and sent["FSDP2"] == pytest.approx(sent["stage 3"], rel=1e-3)
    assert "stage 3 microbatches 1   predicted  1.68 MB   counted  1.68 MB   against stage 0: 1.42" in printed


@pytest.mark.thorough
def test_the_lab_measures_the_bytes_that_it_predicts_and_each_stage_has_a_lower_peak(cells: Path) -> None:
    parameters, found = run(cells, "memories", 4)[0][0]
    for name, (lasting, _) in found.items():
        stage, each = (3, (4, 4, 8)) if name == "FSDP2" else (int(name[-1]), (2, 4, 12))
        want = LAB["bytes_held"].reference(parameters, 4, stage, *each)
        assert sum(want.values()) <= sum(lasting.values()) <= 1.002 * sum(want.values()), name
    peaks = [max(sum(owners.values()) for _, owners, _ in found[f"stage {stage}"][1]) for stage in range(4)]
    assert all(higher < 0.9 * lower for lower, higher in pairwise(peaks)), peaks


@pytest.mark.thorough  # tests/labkit/test_watched.py tries the forms of a gather themselves
@pytest.mark.parametrize("title", [": functional collectives, the last unit gathered twice", *FORMS])
def test_the_timeline_shows_gathers_in_whatever_form_a_right_answer_has_them(cells: Path, title: str) -> None:
    cell, exercise = cells / "timed.py", cells / "exercises" / "gather_on_use.py"
    solution = exercise.read_text()
    exercise.write_text(MARKED.source(f"gather_on_use{title}"))
    try:
        reported, printed = run(cells, cell.stem, 2)
    finally:
        exercise.write_text(solution)
    assert "gathered at least once each, forward and backward: True" in printed
    assert gather_timelines(reported[0], axes=("dp",)).axes


@pytest.mark.thorough
@pytest.mark.parametrize("title", [": waits when the next bucket leaves; reset", *FORMS])
def test_the_timeline_shows_buckets_in_whatever_form_a_right_answer_has_them(cells: Path, title: str) -> None:
    cell, exercise = cells / "early.py", cells / "exercises" / "reduce_early.py"
    solution = exercise.read_text()
    exercise.write_text(MARKED.source(f"reduce_early{title}"))
    try:
        reported, printed = run(cells, cell.stem, 2)
    finally:
        exercise.write_text(solution)
    assert "both ways give the same shards: True" in printed
    for events in reported[0].values():
        assert [name for name, kind, *_ in events if kind == "comm"] == [f"b{n}" for n in range(8)]
