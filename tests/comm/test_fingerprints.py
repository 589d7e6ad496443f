"""Ranks that call different things: an error on every rank, which says who called what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.comm import async_ops
from minimegatron.comm.async_ops import Started, Work, issue
from minimegatron.comm.collectives import all_gather, all_reduce, all_to_all
from minimegatron.comm.fingerprints import fingerprints
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import RankError


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
    mistakes: dict[str, Callable[[], Any]] = {
        "dtype": lambda: all_reduce(x.int() if other else x, axis),
        "shape": lambda: all_reduce(torch.ones(2, 2) if other else x, axis),
        "operation": lambda: all_gather(x, axis) if other else all_reduce(x, axis),
        "reduction": lambda: all_reduce(x, axis, "max" if other else "sum"),
    }
    return raised(mistakes[how])


@pytest.mark.parametrize(
    ("how", "said", "by_rank_1"),
    [
        ("dtype", "all_reduce float32 (4,) on dp", "all_reduce int32 (4,) on dp"),
        ("shape", "all_reduce float32 (4,) on dp", "all_reduce float32 (2, 2) on dp"),
        ("operation", "all_reduce float32 (4,) on dp", "all_gather float32 (4,) on dp"),
        ("reduction", "all_reduce float32 (4,) on dp", "all_reduce float32 (4,) max on dp"),
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
    with fingerprints(False):  # what happens without: numbers, and wrong ones
        total = all_reduce((first if rank == 0 else second).clone(), axis).item()
    named = Work(first, "all_reduce", axis, x=first, extra=names[0])
    return raised(lambda: issue(named, lambda transport: transport.all_reduce(first, axis, "sum"))), total


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
    x = torch.ones(2).as_subclass(Forbidden)
    issue(Work(x, "all_reduce", axis, x=x), lambda transport: Started())
    assert async_ops.last() == ("all_reduce", "tp", (0, 1))
