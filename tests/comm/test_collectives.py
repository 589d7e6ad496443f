"""Each collective against the dense computation, forward and backward, and what it counts."""

from __future__ import annotations

import pytest
import torch

from minimegatron import trace
from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError

N = 4


def rows(rank: int, shape=(8, 3, 4)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weight(rank: int, shape) -> torch.Tensor:
    """What each rank's loss multiplies its output by: different per rank, so that every gradient is recognisable."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def region(rank: int, world: int, name: str, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient) of one function; `shared`: every rank's loss is the same, as after an all-reduce."""
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    x = rows(0 if name in ("scatter_to_region", "scatter_to_sequence_region") else rank).requires_grad_()
    y = getattr(c, name)(x, axis)
    (y * weight(0 if shared else rank, y.shape)).sum().backward()
    return y.detach(), x.grad


def check(ranks, name, shared, output, gradient):
    for rank, (y, grad) in enumerate(ranks(N).run(region, name, shared)):
        torch.testing.assert_close(y, output(rank), rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, gradient(rank), rtol=0, atol=1e-12)


def test_copy_sums_the_gradients(ranks):
    check(ranks, "copy_to_region", False, rows, lambda r: sum(weight(k, (8, 3, 4)) for k in range(N)))


def test_reduce_passes_the_gradient_through(ranks):
    check(ranks, "reduce_from_region", True, lambda r: sum(rows(k) for k in range(N)), lambda r: weight(0, (8, 3, 4)))


def test_scatter_gathers_the_gradients(ranks):
    parts = lambda r: rows(0).chunk(N, -1)[r]  # noqa: E731
    check(ranks, "scatter_to_region", False, parts, lambda r: torch.cat([weight(k, (8, 3, 1)) for k in range(N)], -1))


def test_gather_cuts_the_gradient(ranks):
    whole = lambda r: torch.cat([rows(k) for k in range(N)], -1)  # noqa: E731
    check(ranks, "gather_from_region", True, whole, lambda r: weight(0, (8, 3, 16)).chunk(N, -1)[r])


def test_scatter_to_sequence(ranks):
    check(
        ranks,
        "scatter_to_sequence_region",
        False,
        lambda r: rows(0).chunk(N)[r],
        lambda r: torch.cat([weight(k, (2, 3, 4)) for k in range(N)]),
    )


def test_gather_from_sequence_sums_the_gradients(ranks):
    whole = lambda r: torch.cat([rows(k) for k in range(N)])  # noqa: E731
    check(
        ranks,
        "gather_from_sequence_region",
        False,
        whole,
        lambda r: sum(weight(k, (32, 3, 4)) for k in range(N)).chunk(N)[r],
    )


def test_reduce_scatter_gathers_the_gradients(ranks):
    part = lambda r: sum(rows(k) for k in range(N)).chunk(N)[r]  # noqa: E731
    check(
        ranks,
        "reduce_scatter_to_sequence_region",
        False,
        part,
        lambda r: torch.cat([weight(k, (2, 3, 4)) for k in range(N)]),
    )


def uneven(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    sent = [(rank + j) % 3 for j in range(world)]
    got = [(i + rank) % 3 for i in range(world)]
    x = (torch.arange(sum(sent), dtype=torch.float64) + 100 * rank)[:, None].requires_grad_()
    y = c.all_to_all_region(x, axis, got, sent)
    (y * (1000 * rank + torch.arange(len(y), dtype=torch.float64)[:, None])).sum().backward()
    return y.detach(), x.grad


def test_all_to_all_with_uneven_splits_takes_the_same_way_back(ranks):
    results = ranks(N).run(uneven)
    for r, (y, _) in enumerate(results):
        expected = []
        for i in range(N):
            start = sum((i + j) % 3 for j in range(r))
            expected += [100.0 * i + start + k for k in range((i + r) % 3)]
        assert y.flatten().tolist() == expected
    for i, (_, grad) in enumerate(results):
        expected = []
        for j in range(N):
            start = sum((k + j) % 3 for k in range(i))
            expected += [1000.0 * j + start + k for k in range((i + j) % 3)]
        assert grad.flatten().tolist() == expected


def counted(rank: int, world: int) -> dict:
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    x = torch.ones(4, 6, requires_grad=True)
    with trace.record(rank) as log:
        c.reduce_from_region(c.copy_to_region(x, axis), axis).sum().backward()
        c.gather_from_sequence_region(x, axis).sum().backward()
        c.reduce_scatter_to_sequence_region(x, axis).sum().backward()
    wire = sum(e.wire_bytes for e in log.select("all_reduce"))
    return {**log.summary(), "wire": wire}


def test_bytes_are_counted(ranks):
    n = 4 * 6 * 4
    for says in ranks(2).run(counted):
        assert says["all_reduce/tp"] == {"count": 2, "nbytes": 2 * n}
        assert says["all_gather/tp"] == {"count": 2, "nbytes": 2 * n + n}
        assert says["reduce_scatter/tp"] == {"count": 2, "nbytes": 2 * n + n}
        assert says["wire"] == 2 * (2 * n * (2 - 1) / 2)


def test_a_group_of_one_returns_its_argument_and_counts_nothing():
    axis = Mesh.serial().tp
    x = torch.randn(4, 6)
    with trace.record() as log:
        for name in (
            "copy_to_region reduce_from_region scatter_to_region gather_from_region scatter_to_sequence_region "
            "gather_from_sequence_region reduce_scatter_to_sequence_region all_to_all_region all_reduce all_gather "
            "reduce_scatter all_to_all broadcast"
        ).split():
            assert getattr(c, name)(x, axis) is x, name
    assert log.events == []


def not_divisible(rank: int, world: int) -> list[str]:
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    said = []
    for call in (
        lambda: c.reduce_scatter(torch.ones(3, 2), axis),
        lambda: c.scatter_to_region(torch.ones(2, 3), axis),
        # torch cuts 6 columns into 4 parts as 2 + 2 + 2 + nothing: 12 rows of 2, which 4 ranks can share
        lambda: c.reduce_scatter(torch.ones(4, 6), axis, 1),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_cannot_be_cut_is_refused_before_anything_travels(ranks):
    first, second, third = ranks(4).run(not_divisible)[0]
    assert "size 3 into 4" in first and "size 3 into 4" in second and "size 6 into 4" in third and "fix: make" in first


def along_other_dims(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    return c.all_gather(rows(rank), axis, 1), c.reduce_scatter(rows(rank), axis, 2)


def test_all_gather_and_reduce_scatter_along_other_dims(ranks):
    for r, (gathered, reduced) in enumerate(ranks(2).run(along_other_dims)):
        assert torch.equal(gathered, torch.cat([rows(0), rows(1)], 1))
        torch.testing.assert_close(reduced, (rows(0) + rows(1)).chunk(2, 2)[r])


def plain_calls(rank: int, world: int) -> dict:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
    axis, mine = mesh.tp, torch.tensor([float(rank), -float(rank)])
    called = {op: c.all_reduce(mine.clone(), axis, op).tolist() for op in ("sum", "max", "min")}
    called |= {f"from {src}": c.broadcast(mine.clone(), axis, src).tolist() for src in (0, 1)}
    return called | {"dp from 1": c.broadcast(mine.clone(), mesh.dp, 1).tolist()}


def test_operations_and_sources_are_those_that_were_asked_for(ranks):
    said = ranks(4).run(plain_calls)
    assert said[2] == {
        "sum": [5.0, -5.0],
        "max": [3.0, -2.0],
        "min": [2.0, -3.0],
        "from 0": [2.0, -2.0],
        "from 1": [3.0, -3.0],
        "dp from 1": [2.0, -2.0],
    }
    assert said[0]["max"] == [1.0, 0.0] and said[1]["from 0"] == [0.0, 0.0] and said[0]["dp from 1"] == [2.0, -2.0]


def inputs_after(rank: int, world: int) -> list[bool]:
    """Whether what goes into a region, forwards and backwards, is untouched by it."""
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=2)).tp
    kept = []
    for region in (c.copy_to_region, c.reduce_from_region):
        x = torch.full((3,), float(rank + 1), requires_grad=True)
        before, y = x.detach().clone(), region(x * 1.0, axis)
        doubled = x.detach() * 1.0
        region(doubled, axis)
        grad = torch.full((3,), float(rank + 2))
        y.backward(grad)
        kept += [torch.equal(x.detach(), before), torch.equal(doubled, before), bool((grad == rank + 2).all())]
    return kept


def test_a_sum_inside_a_region_does_not_write_into_what_it_was_given(ranks):
    assert ranks(2).run(inputs_after) == [[True] * 6] * 2


def in_place(rank: int, world: int) -> tuple[list[list[float]], list[list[float]]]:
    """[terms, sum] after a reduce-scatter into this rank's terms; [part, whole] after a gather around this part."""
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    terms, whole = torch.arange(2.0 * world) + 100 * rank, torch.full((2 * world,), -1.0)
    mine, part = terms.chunk(world)[rank], whole.chunk(world)[rank]
    total = c.reduce_scatter_start(terms, axis, mine).wait()
    part.fill_(float(rank))
    gathered = c.all_gather_start(part, axis, whole).wait()
    assert total.data_ptr() == mine.data_ptr() and gathered.data_ptr() == whole.data_ptr()
    return [terms.tolist(), total.tolist()], [part.tolist(), whole.tolist()]


@pytest.mark.parametrize("world", [2, 4])
def test_in_place_a_rank_writes_its_own_part_of_a_sum_and_the_others_parts_of_a_gather(ranks, world: int) -> None:
    for rank, ((terms, total), (part, whole)) in enumerate(ranks(world).run(in_place)):
        want = [world * x + 100.0 * sum(range(world)) for x in (2.0 * rank, 2.0 * rank + 1)]
        untouched = [x + 100.0 * rank for x in range(2 * world)]
        assert total == want and terms == untouched[: 2 * rank] + want + untouched[2 * rank + 2 :]
        assert part == [rank] * 2 and whole == [float(r) for r in range(world) for _ in range(2)]
