"""Every pipeline schedule gives the gradients of one process, in every company."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import RankError
from minimegatron.layers.param import layout_of
from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline import plain as pipeline
from minimegatron.parallel.pipeline.schedules import Schedule, build_schedule, gpipe, one_f_one_b, schedule_from_text
from minimegatron.training.pipelined import forward_backward
from minimegatron.training.step import forward_step
from tests.axes import PP, SP, TP, VP
from tests.thorough import SLOW, mostly_thorough
from tests.twin import Case, accumulate, compare_all, microbatch, parallel_model, problems

SCHEDULE, GROUP = "pipeline_schedule", "microbatch_group_size_per_virtual_pipeline_stage"
FAMILIES: list[tuple[str, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2),
]  # fmt: skip
TIED = {"family": "gpt2", "num_query_groups": 4, "untie_embeddings_and_output_weights": False}
Run = Callable[..., None]
RUNS = [pytest.param(pipeline.run, id="plain"), pytest.param(overlapped.run, id="overlapped")]
both_executors = pytest.mark.parametrize("run", RUNS)
overlapped_first = pytest.mark.parametrize(
    "run", mostly_thorough([pipeline.run, overlapped.run], [1]), ids=["plain", "overlapped"]
)
# An ordinary run takes each executor once: the plain one on two ranks, the overlapped one on four.
executors_and_ranks = pytest.mark.parametrize(
    "run, p",
    mostly_thorough([(run, p) for run in (pipeline.run, overlapped.run) for p in (2, 4)], [0, 3], [3]),
    ids=["plain-2", "plain-4", "overlapped-2", "overlapped-4"],
)


def case_of(schedule: str | None, p: int, m: int, layout: dict[str, Any] | None = None, **fields: Any) -> Case:
    model = {"num_layers": 8, **fields.pop("model", {})}
    return Case({PP: p, SCHEDULE: schedule, **(layout or {})}, model, **{"accumulation": m, "double": True, **fields})


def legal(schedule: str, p: int, m: int) -> dict[str, Any] | None:
    """Options under which the schedule has so many microbatches, or None."""
    if schedule == "interleaved" and 0 < m % p:
        group = next((n for n in range(p, m + 1) if m % n == 0 or m % n >= p), None)
        return None if group is None else {GROUP: group}
    return {}


def training_with(run: Run) -> contextlib.AbstractContextManager:
    """Training steps of the block run their lists with this executor."""
    return mock.patch.object(overlapped, "run", run)


def compare_all_with(rank: int, world: int, run: Run, cases: list[Case]) -> list[dict[str, Any]]:
    with training_with(run):
        return compare_all(rank, world, cases)


def same_as_serial(ranks: Any, world: int, cases: list[Case], run: Run = overlapped.run) -> None:
    for reports in ranks(world).run(compare_all_with, run, cases, timeout=120):
        for case, report in zip(cases, reports, strict=True):
            assert problems(report, 1e-10 if case.double else 1e-5) == [], case


MICROBATCHES = [(run, p, m) for run in (pipeline.run, overlapped.run)
                for p in (2, 4) for m in sorted({p, 2 * p, 3 * p - 1, 8})]  # fmt: skip


@pytest.mark.parametrize(
    "run, p, m",
    mostly_thorough(
        MICROBATCHES,
        lambda case: case in ((pipeline.run, 2, 5), (overlapped.run, 4, 8)),
        lambda case: case == (pipeline.run, 2, 5),
    ),
)
def test_every_schedule_and_number_of_microbatches(ranks, run, p, m):
    cases = []
    for schedule, chunks in FAMILIES:
        options = legal(schedule, p, m)
        assert options is not None, "every one of these sizes has a group"
        cases.append(case_of(schedule, p, m, options, seed=m, model={"num_layers": chunks * p}))
    same_as_serial(ranks, p, cases, run)


COMPANY = [(name, layout, tied) for layout in ({TP: 2}, {TP: 2, SP: True}, {}) for tied in (False, True)
           for name, _ in FAMILIES]  # fmt: skip


# An ordinary run takes these, with a tied embedding.
ONCE: dict[str, dict[str, Any]] = {
    "1f1b": {TP: 2, SP: True},
    "zb_v": {TP: 2, SP: True},
    "interleaved": {},
    "dualpipe_v": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, layout, tied",
    mostly_thorough(
        COMPANY,
        lambda case: case[2] and ONCE.get(case[0]) == case[1],
        lambda case: case == ("zb_v", ONCE["zb_v"], True),
    ),
    ids=str,
)
def test_with_tensor_and_data_parallelism(ranks, schedule, layout, tied):
    overlap = {} if TP in layout else {"overlap": True, "bucket_size": 3000}
    model = {"num_layers": 4, **(TIED if tied else {})}
    same_as_serial(ranks, 4, [case_of(schedule, 2, 4, layout, model=model, **overlap)])


@SLOW
@overlapped_first
def test_tied_embeddings_and_interleaving_of_four_ranks(ranks, run):
    model = {**TIED, "num_layers": 8}
    same_as_serial(ranks, 4, [case_of(name, 4, 4, model=model) for name in ("1f1b", "interleaved", "zb_v")], run)


UNEVEN: list[tuple[int, int, dict[str, Any]]] = [
    (5, 2, {"num_layers_in_first_pipeline_stage": 2}),
    (6, 2, {"num_layers_in_first_pipeline_stage": 2, VP: 2}),
    (7, 4, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}),
    (6, 4, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    (6, 2, {"pipeline_model_parallel_layout": "Et|ttt||tt,L"}),
    (4, 2, {"pipeline_model_parallel_layout": "E||t*3|tL", SCHEDULE: "zb_v"}),
    (3, 2, {"pipeline_model_parallel_layout": "Ettt|L"}),
]


@pytest.mark.slow
@executors_and_ranks
def test_uneven_stages(ranks, run, p):
    chosen = [(layers, layout) for layers, ranks_of, layout in UNEVEN if ranks_of == p]
    cases = [
        case_of(layout.get(SCHEDULE), p, 4, layout, model={**(TIED if i % 2 else {}), "num_layers": layers})
        for i, (layers, layout) in enumerate(chosen)
    ]
    same_as_serial(ranks, p, cases, run)


@pytest.mark.slow
@overlapped_first
def test_fewer_microbatches_than_stages(ranks, run):
    names = ("gpipe", "1f1b", "zb_h1")
    same_as_serial(ranks, 4, [case_of(name, 4, 2, model={"num_layers": 4}) for name in names], run)
    with pytest.raises(RankError, match="raise the number of microbatches from 2 to at least 4, or use 1f1b"):
        same_as_serial(ranks, 4, [case_of("interleaved", 4, 2)])


# ------------------------------------------------------------------------------------ equal to the last bit


def gradients(rank: int, world: int, case: Case, run: Run = overlapped.run) -> dict[str, torch.Tensor]:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    ddp = parallel_model(case, mesh)
    with training_with(run):
        accumulate(ddp, case, mesh)
    return {name: p.main_grad.clone() for name, p in ddp.params.items() if not layout_of(p).shared}


def whole(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: grad for part in results for name, grad in part.items()}


@SLOW
def test_bit_for_bit_where_microbatches_come_in_one_order(ranks):
    """In fp32: 1F1B, GPipe and interleaved add the same numbers in the same order; ZB-H1 and ZB-V each other's.

    Both executors do, of every schedule.
    """
    cases = {name: case_of(name, 2, 4, double=False, model={**TIED, "num_layers": 4}) for name, _ in FAMILIES}
    runs = {"plain": pipeline.run, "overlapped": overlapped.run}
    found = {
        (name, way): whole(ranks(2).run(gradients, case, run))
        for name, case in cases.items()
        for way, run in runs.items()
    }
    pairs = [((name, "overlapped"), (name, "plain")) for name in cases]
    for first, others in (("1f1b", ("gpipe", "interleaved")), ("zb_h1", ("zb_v",))):
        pairs += [((first, "plain"), (other, "plain")) for other in others]
    for first, other in pairs:
        assert found[first].keys() == found[other].keys()
        for name, grad in found[first].items():
            if name == "embedding.word_embeddings.weight" and first[0] != other[0] == "zb_v":
                continue  # both of its uses are on one rank, and are added in another order
            assert torch.equal(grad, found[other][name]), f"{name}: {first} and {other}"


# ------------------------------------------------------------------------------------ lists of one's own


def run_list(rank: int, world: int, case: Case, schedule: Schedule, run: Run = overlapped.run) -> float:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    ddp = parallel_model(case, mesh)
    batches = iter([microbatch(case, 0, i) for i in range(case.accumulation)])
    with training_with(run):
        forward_backward(forward_step, batches, ddp, case.accumulation, lambda loss: loss, schedule)
    ddp.finish_grad_sync()
    assert all(getattr(module, "wgrad_store", None) is None for module in ddp.modules()), "nothing defers after the run"
    return sum(float(p.main_grad.abs().sum()) for p in ddp.params.values())


@both_executors
def test_a_list_of_ones_own(ranks, run):
    case = case_of("1f1b", 2, 3, model={"num_layers": 2})
    mine = schedule_from_text("mine", ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 B1 F2 B2"])
    assert ranks(2).run(run_list, case, mine, run) == pytest.approx(ranks(2).run(run_list, case, one_f_one_b(2, 3)))


@overlapped_first
def test_a_list_that_splits_some_backwards_alone(ranks, run):
    """B1 of rank 0 computes everything, B0 leaves the weights to W0, which comes last; buckets travel meanwhile."""
    case = case_of("1f1b", 2, 2, overlap=True, bucket_size=1000, model={"num_layers": 2})
    mine = schedule_from_text("mine", ["F0 F1 B0 B1 W0", "F0 F1 B0 B1 W1"])
    want = ranks(4).run(run_list, case, one_f_one_b(2, 2))
    assert ranks(4).run(run_list, case, mine, run) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "rows, words",
    [
        (["F0 B0 F1 B1 F2 B2", "F0 F1 F2 B0 B1 B2"], "rank"),  # rank 1 wants F1 before it gives B0
        (["F0 F1 F2 B0 B1 B2", "F0 F1 B0 B1 F2"], "B2"),
    ],
    ids=["waits for itself", "incomplete"],
)
def test_a_wrong_list_is_refused_before_anything_runs(ranks, rows, words):
    case = case_of("1f1b", 2, 3, model={"num_layers": 2})
    with pytest.raises(RankError, match=f"(?s)`mine` cannot run.*{words}"):
        ranks(2).run(run_list, case, schedule_from_text("mine", rows), timeout=20)


def test_a_list_for_another_pipeline_is_refused(ranks):
    case = case_of("1f1b", 2, 3, model={"num_layers": 2})
    for schedule, words in ((gpipe(2, 4), "the step has 3"), (build_schedule("zb_v", 2, 3), "puts stages")):
        with pytest.raises(RankError, match=words):
            ranks(2).run(run_list, case, schedule)


# ------------------------------------------------------------------------------------ what is sent, when, and kept


def measured(rank: int, world: int, case: Case, run: Run = overlapped.run) -> tuple[trace.Log, int]:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    ddp = parallel_model(case, mesh)
    with trace.record(rank) as log, training_with(run):
        accumulate(ddp, case, mesh)
    assert ddp.module.mail.pending_sends() == 0, "nothing is kept after a step"
    return log, mesh.parallel.pipeline_model_parallel_size


@both_executors
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_messages_and_live_activations_are_those_of_the_schedule(ranks, schedule, run):
    case = case_of(schedule, 2, 4, model={"num_layers": 4}, double=False)
    want = build_schedule(schedule, 2, 4)
    nbytes = case.seq_length * case.micro_batch_size * case.config.hidden_size * 4
    logs = [log for log, _ in ranks(2).run(measured, case, run)]
    for rank, log in enumerate(logs):
        messages = want.messages(rank, 1 - rank)
        assert [e.note.split(" ")[0] for e in log.select("send")] == [f"{m.kind}{m.microbatch}" for m in messages]
        assert log.nbytes("send", axis="pp") == nbytes * len(messages)
        assert log.count("recv", axis="pp") == len(want.messages(1 - rank, rank))
        done = [f"{e.name}{e.note}" for e in log.events if e.name in ("F", "B", "W")]
        assert done == [str(action) for action in want.actions[rank]]
    peaks = [max(int(e.note) for e in log.select("live")) for log in logs]
    assert peaks == {"1f1b": [2, 1], "interleaved": [5, 3], "zb_h1": [2, 2], "zb_v": [4, 4]}[schedule]
    for log in logs:
        live = log.select("live")
        assert live[-1].nbytes == 0 and max(e.nbytes for e in live) > 4 * nbytes


@pytest.mark.slow
def test_gradients_travel_inside_the_last_backward(ranks):
    """With overlap every bucket but the last one is under way before the last action ends, and each travels once."""
    for schedule in ("1f1b", "zb_h1", "zb_v"):
        case = case_of(schedule, 2, 4, overlap=True, bucket_size=2000, model={"num_layers": 4})
        for log, _ in ranks(4).run(measured, case):
            buckets = log.select("all_reduce", axis="dp_cp")[:-1]  # the last is the token count
            ended = max(e.end for e in log.events if e.name in ("F", "B", "W"))
            last = max(e.start for e in log.events if e.name in ("F", "B", "W"))
            assert len(buckets) > 4
            early = [e for e in buckets if e.start < ended]
            assert len(early) >= len(buckets) - 1 and all(e.start > last or schedule == "zb_v" for e in early)
