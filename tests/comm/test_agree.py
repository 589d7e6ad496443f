"""One rank's failure is everybody's; one rank's result, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from minimegatron.comm.agree import on_all_ranks, on_rank_zero
from minimegatron.comm.mesh import Axis
from minimegatron.errors import DataError, RankError


def world_axis(rank: int, world: int) -> Axis:
    return Axis("dp", tuple(range(world)), rank, dist.group.WORLD)


# ------------------------------------------------------------------------------------------ errors, together


def fail_on_one(rank: int, world: int, only_zero: bool) -> str:
    axis = world_axis(rank, world)

    def work() -> int:
        if rank == (0 if only_zero else 1):
            raise DataError("no such document", where="corpus.bin, document 7")
        return rank

    try:
        (on_rank_zero if only_zero else on_all_ranks)(work, axis)
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
    return on_all_ranks(lambda: rank, axis), on_rank_zero(lambda: 10 + rank, axis)


def test_results_are_everybodys_own_or_that_of_rank_zero(ranks: Any) -> None:
    assert ranks(2).run(succeed, timeout=20) == [(0, 10), (1, 10)]


def test_on_a_group_of_one_nothing_is_sent() -> None:
    alone = Axis("dp", (0,), 0)
    assert on_all_ranks(lambda: 3, alone) == on_rank_zero(lambda: 3, alone) == 3
    with pytest.raises(ZeroDivisionError):
        on_all_ranks(lambda: 1 // 0, alone)
