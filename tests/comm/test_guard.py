"""Ranks that disagree: the guard says so, and says who."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.comm import guard
from minimegatron.comm.collectives import all_gather, all_reduce, all_to_all
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import DataError, RankError


def world_axis(rank: int, world: int) -> Axis:
    return Axis("dp", tuple(range(world)), rank, dist.group.WORLD)


def raised(call: Callable[[], Any]) -> str:
    """The text of the RankError that `call` must raise."""
    with pytest.raises(RankError) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- fingerprints


def disagree(rank: int, world: int, how: str) -> str:
    axis, x = world_axis(rank, world), torch.ones(4)
    all_reduce(x.clone(), axis)
    other = rank == 1
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: all_reduce(x.int() if other else x, axis),
        "shape": lambda: all_reduce(torch.ones(2, 2) if other else x, axis),
        "operation": lambda: all_gather(x, axis) if other else all_reduce(x, axis),
        "reduction": lambda: guard.before("all_reduce", x, axis, extra="max" if other else "sum"),
    }
    return raised(calls[how])


@pytest.mark.parametrize(
    ("how", "said", "by_rank_1"),
    [
        ("dtype", "all_reduce float32 (4,) on dp", "all_reduce int32 (4,) on dp"),
        ("shape", "all_reduce float32 (4,) on dp", "all_reduce float32 (2, 2) on dp"),
        ("operation", "all_reduce float32 (4,) on dp", "all_gather float32 (4,) on dp"),
        ("reduction", "all_reduce float32 (4,) sum on dp", "all_reduce float32 (4,) max on dp"),
    ],
)
def test_a_mismatched_collective_is_an_error_on_every_rank(ranks: Any, how: str, said: str, by_rank_1: str) -> None:
    expected = f"ranks disagree at collective 2 of dp: ranks 0, 2: {said}; rank 1: {by_rank_1}"
    for text in ranks(3).run(disagree, how, timeout=20):
        assert text.startswith(expected), text


def swap(rank: int, world: int) -> tuple[str, float]:
    axis = world_axis(rank, world)
    first, second = torch.tensor([1.0]), torch.tensor([10.0])
    names = ("loss", "norm") if rank == 0 else ("norm", "loss")
    with guard.fingerprints(False):  # what happens without: numbers, and wrong ones
        total = all_reduce((first if rank == 0 else second).clone(), axis).item()
    return raised(lambda: guard.before("all_reduce", first, axis, extra=names[0])), total


def test_two_swapped_collectives_of_one_shape_return_numbers_unless_they_are_named(ranks: Any) -> None:
    for text, silent in ranks(2).run(swap, timeout=20):
        assert "rank 0: all_reduce float32 (1,) loss" in text and "rank 1: all_reduce float32 (1,) norm" in text
        assert silent == 11.0


def agree(rank: int, world: int) -> float:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
    x = torch.ones(4, requires_grad=True)
    for axis in (mesh.tp, mesh.dp, mesh.world):
        all_reduce(x.detach().clone(), axis)
    splits = [1, 2] if mesh.tp.rank == 0 else [2, 1]
    all_to_all(torch.ones(3), mesh.tp, [1, 2] if mesh.tp.rank == 0 else [2, 1], splits)
    return all_reduce(torch.tensor([1.0]), mesh.world).item()


def test_calls_that_agree_pass_also_uneven_ones_and_on_several_axes(ranks: Any) -> None:
    assert ranks(4).run(agree, timeout=20) == [4.0] * 4


def test_without_fingerprints_a_call_only_remembers() -> None:
    class Forbidden(torch.Tensor):
        @property
        def dtype(self) -> torch.dtype:
            raise AssertionError("the tensor was looked at")

    axis = Axis("tp", (0, 1), 0, None)
    guard.before("all_reduce", torch.ones(2).as_subclass(Forbidden), axis)
    assert guard.last_collective() == ("all_reduce", axis)


# ------------------------------------------------------------------------------------------ errors, together


def fail_on_one(rank: int, world: int, only_zero: bool) -> str:
    axis = world_axis(rank, world)

    def work() -> int:
        if rank == (0 if only_zero else 1):
            raise DataError("no such document", where="corpus.bin, document 7")
        return rank

    try:
        (guard.on_rank_zero if only_zero else guard.on_all_ranks)(work, axis)
    except (DataError, RankError) as error:
        return f"{type(error).__name__}: {error.what}"
    return "went on alone"


@pytest.mark.parametrize(("only_zero", "failing"), [(False, 1), (True, 0)])
def test_an_error_on_one_rank_is_raised_on_all(ranks: Any, only_zero: bool, failing: int) -> None:
    said = ranks(3).run(fail_on_one, only_zero, timeout=20)
    assert said.pop(failing) == "DataError: no such document"
    for text in said:
        assert text.startswith(f"RankError: rank {failing} failed: DataError: no such document")


def succeed(rank: int, world: int) -> tuple[int, int]:
    axis = world_axis(rank, world)
    return guard.on_all_ranks(lambda: rank, axis), guard.on_rank_zero(lambda: 10 + rank, axis)


def test_results_are_everybodys_own_or_that_of_rank_zero(ranks: Any) -> None:
    assert ranks(2).run(succeed, timeout=20) == [(0, 10), (1, 10)]


def test_on_a_group_of_one_nothing_is_sent() -> None:
    alone = Axis("dp", (0,), 0)
    assert guard.on_all_ranks(lambda: 3, alone) == guard.on_rank_zero(lambda: 3, alone) == 3
    with pytest.raises(ZeroDivisionError):
        guard.on_all_ranks(lambda: 1 // 0, alone)


# ---------------------------------------------------------------------------------------------- consequences


def lose(rank: int, world: int) -> tuple[bool, bool] | None:
    """Rank 1 leaves, or is late; what do the others get?"""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 1:
        time.sleep(3)
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return guard.is_consequence(error), guard.timed_out(error)
    return None


def test_what_gloo_says_of_a_silent_peer_is_recognised(ranks: Any) -> None:
    assert ranks(2).run(lose, timeout=20)[0] == (True, True)


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:27788. This is typically ..."), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("Connection closed by peer"), False),
        (RankError("rank 1 failed: RuntimeError: Connection closed by peer"), False),
    ],
)
def test_consequences_are_told_from_causes(error: BaseException, consequence: bool) -> None:
    assert guard.is_consequence(error) is consequence


@given(st.sets(st.integers(0, 30)))
def test_ranges_read_back(numbers: set[int]) -> None:
    back: set[int] = set()
    for part in filter(None, guard.ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        back.update(range(int(first), int(last or first) + 1))
    assert back == numbers
    assert guard.ranges([0, 1, 2, 5]) == "0-2, 5"
