"""Ranks that call different things: an error on every rank, which says who called what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.comm import async_ops
from minimegatron.comm import fingerprints as replicas
from minimegatron.comm.async_ops import Work, issue
from minimegatron.comm.collectives import all_gather, all_reduce, all_to_all
from minimegatron.comm.fingerprints import fingerprints
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.comm.transport import Started
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
def test_a_mismatched_collective_is_an_error_on_every_rank(pools: Any, how: str, said: str, by_rank_1: str) -> None:
    expected = f"ranks disagree at collective 2 of dp: ranks 0, 2: {said}; rank 1: {by_rank_1}"
    for text in pools(3, fingerprints=True).run(disagree, how, timeout=20):
        assert text.startswith(expected), text


def swap(rank: int, world: int) -> tuple[str, float]:
    axis = world_axis(rank, world)
    first, second = torch.tensor([1.0]), torch.tensor([10.0])
    names = ("loss", "norm") if rank == 0 else ("norm", "loss")
    with fingerprints(False):  # what happens without: numbers, and wrong ones
        total = all_reduce((first if rank == 0 else second).clone(), axis).item()
    named = Work(first, "all_reduce", axis, x=first, extra=names[0])
    return raised(lambda: issue(named, lambda transport: transport.all_reduce(first, first, axis, "sum"))), total


def test_two_swapped_collectives_of_one_shape_return_numbers_unless_they_are_named(pools: Any) -> None:
    for text, silent in pools(2, fingerprints=True).run(swap, timeout=20):
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


def test_calls_that_agree_pass_also_uneven_ones_and_on_several_axes(pools: Any) -> None:
    assert pools(4, fingerprints=True).run(agree, timeout=20) == [4.0] * 4


def test_without_fingerprints_a_call_only_remembers() -> None:
    class Forbidden(torch.Tensor):
        @property
        def dtype(self) -> torch.dtype:
            raise AssertionError("the tensor was looked at")

    axis = Axis("tp", (0, 1), 0, None)
    x = torch.ones(2).as_subclass(Forbidden)
    issue(Work(x, "all_reduce", axis, x=x), lambda transport: Started())
    assert async_ops.last() == ("all_reduce", "tp", (0, 1))


# --------------------------------------------------------------------------------------------------------------- copies

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 7))
def test_bit_sum_is_the_weighted_sum_of_the_words(words: list[int], chunk: int) -> None:
    array = np.array(words, dtype=np.uint32).view(np.int32)
    expected = sum((2 * i + 1) * int(v) for i, v in enumerate(array)) % 2**64
    assert replicas.bit_sum(torch.from_numpy(array).view(torch.float32), chunk=chunk) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_and_one_swap_change_the_sum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * size,), dtype=torch.uint8, generator=generator)
    reference = replicas.bit_sum(raw.view(dtype))
    for trial in range(30):
        bit = 0 if dtype == torch.bool else trial % 8
        flipped = raw.clone()
        flipped[7 * trial % len(raw)] ^= 1 << bit
        assert replicas.bit_sum(flipped.view(dtype)) != reference
    rows = raw.view(24, size)
    i, j = next((i, j) for i in range(24) for j in range(i) if not torch.equal(rows[i], rows[j]))
    order = list(range(24))
    order[i], order[j] = j, i
    assert replicas.bit_sum(rows[order].reshape(-1).view(dtype)) != reference


def test_bit_sum_does_not_depend_on_strides_and_takes_empty_and_scalar() -> None:
    x = torch.randn(6, 4)
    assert replicas.bit_sum(x.t()) == replicas.bit_sum(x.t().contiguous()) != replicas.bit_sum(x)
    assert replicas.bit_sum(torch.empty(0, 3)) == 0
    assert replicas.bit_sum(torch.tensor(1, dtype=torch.int32)) == 1


def compare_replicas(rank: int, world: int, how: str) -> str:
    axis = world_axis(rank, world)
    tensors = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(3, dtype=torch.bfloat16)}

    def check() -> None:
        replicas.check_copies({name: (x, [axis]) for name, x in tensors.items()}, axis)

    check()
    if how == "bit" and rank == 2:
        tensors["bias"].view(torch.int16)[1] ^= 1
    if how == "minus zero" and rank == 2:
        tensors["weight"][0, 0] = -0.0
    if how == "shape" and rank == 2:
        tensors["weight"] = tensors["weight"].t()
    if how == "missing" and rank == 2:
        del tensors["bias"]
    return raised(check)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("bit", "1 of 2 tensors differ between copies over dp, first 'bias' (ranks 0-1: "),
        ("minus zero", "1 of 2 tensors differ between copies over dp, first 'weight' (ranks 0-1: "),
        ("shape", "ranks 0-1: 2 tensors, digest "),
        ("missing", "rank 2: 1 tensors, digest "),
    ],
)
def test_replicas_are_compared_by_their_bits(ranks: Any, how: str, said: str) -> None:
    for text in ranks(3).run(compare_replicas, how, timeout=20):
        assert said in text, text
        alone = "axis dp, ranks 0-2; rank 2 differs from the others" in text and "what rank 2 alone has done" in text
        assert alone == (how in ("bit", "minus zero")), text


def test_on_a_group_of_one_nothing_is_sent() -> None:
    replicas.check_copies({"weight": (torch.ones(1), [Axis("dp", (0,), 0)])}, Axis("world", (0,), 0))


# ------------------------------------------------------------------------------------------- over several axes


def spoil(rank: int, world: int, name: str, spoiled: tuple[int, ...]) -> str:
    """tp 2 x dp 2: a matrix cut over tp, a norm that is not; some ranks' copies of one of them are another bit."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
    tensors = {"matrix": torch.full((3,), float(mesh.tp.rank)), "norm": torch.ones(2), "mine": torch.rand(1)}
    axes: dict[str, list[Axis]] = {"matrix": [mesh.dp], "norm": [mesh.tp, mesh.dp], "mine": []}
    tensors["mine"].fill_(rank)
    if rank in spoiled:
        tensors[name].view(torch.int32)[0] ^= 1
    copies = {n: (tensor, axes[n]) for n, tensor in tensors.items()}
    if not spoiled:
        replicas.check_copies(copies, mesh.world)
        return ""
    with pytest.raises(RankError) as caught:
        replicas.check_copies(copies, mesh.world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "spoiled", "said"),
    [
        ("norm", (), ""),
        ("matrix", (3,), "1 of 2 tensors differ between copies over dp, first 'matrix' (rank 1: "),
        ("norm", (1, 3), "1 of 1 tensors differ between copies over tp, first 'norm' (rank 0: "),
        ("norm", (2, 3), "1 of 2 tensors differ between copies over dp, first 'norm' (rank 0: "),
    ],
)
def test_the_axis_the_tensor_and_the_ranks_are_named_on_all_ranks(
    ranks: Any, name: str, spoiled: tuple[int, ...], said: str
) -> None:
    texts = ranks(4).run(spoil, name, spoiled, timeout=30)
    assert len(set(texts)) == 1 and texts[0].startswith(said) and bool(texts[0]) == bool(spoiled), texts
    assert "differs from" not in texts[0], "of two copies none is known to be right"


def other_number(rank: int, world: int) -> str:
    axis = world_axis(rank, world)
    rate = torch.tensor(0.25 if rank == 1 else 0.5, dtype=torch.float64)
    return raised(lambda: replicas.check_copies({"rate": (rate, [axis])}, axis))


def test_a_number_is_shown_as_one(ranks: Any) -> None:
    for text in ranks(3).run(other_number, timeout=20):
        assert "first 'rate' (ranks 0, 2: 0.5, bits " in text and "; rank 1: 0.25, bits " in text
