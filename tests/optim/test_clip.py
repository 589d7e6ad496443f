"""The global norm: torch's number in one process, each element once in many, and no lie about infinities."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.ranks.pool import shared_pool
from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.param import ParamLayout
from minimegatron.optim.clip import clip_coefficient, clip_grad_norm_, counts_here, grad_stats

WORLD = Mesh.serial().world
SHAPES = [(7, 5), (5,), (0,), (3, 2, 4), ()]


def gradients(seed: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_equals_torch(norm_type: float, max_norm: float) -> None:
    ours, theirs = gradients(), [torch.nn.Parameter(torch.empty(s)) for s in SHAPES]
    for param, grad in zip(theirs, gradients(), strict=True):
        param.grad = grad
    if norm_type == math.inf:  # torch has no maximum of nothing
        theirs = [p for p in theirs if p.numel()]
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    got = clip_grad_norm_([(g, True) for g in ours], max_norm, WORLD, norm_type)
    torch.testing.assert_close(got.float(), want)
    for grad, param in zip([g for g in ours if g.numel()], [p for p in theirs if p.numel()], strict=True):
        torch.testing.assert_close(grad, param.grad)


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_norm_does_not_depend_on_the_cut(seed: int, pieces: int) -> None:
    whole = torch.randn(60, generator=torch.Generator().manual_seed(seed))
    norms = [grad_stats([(g, True) for g in grads], WORLD).norm for grads in ([whole], list(whole.chunk(pieces)))]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-13, atol=0)


def test_squares_are_added_in_double() -> None:
    """fp32 sums lose 0.8 % here, and cannot hold 1e20 squared."""
    many = torch.full((10_000_000,), 0.1)
    want = math.sqrt(many.numel()) * many[0].item()
    assert grad_stats([(many, True)], WORLD).norm.item() == pytest.approx(want, rel=1e-9)
    assert torch.linalg.vector_norm(many).item() != pytest.approx(want, rel=1e-3)
    assert grad_stats([(torch.tensor([1e20, 1e20]), True)], WORLD).norm.item() == pytest.approx(2**0.5 * 1e20)


def test_the_coefficient() -> None:
    for norm in (4.0, 0.5, 1.0, 0.0):
        found = clip_coefficient(torch.tensor(norm, dtype=torch.float64), 1.0)
        assert found.item() == clip_coefficient(norm, 1.0), "the host and the device compute one formula"
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(1.0, 1.0) < 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("counts", [True, False])
def test_a_bad_number_shows_even_where_it_is_not_counted(bad: float, norm_type: float, counts: bool) -> None:
    spoiled, healthy = torch.tensor([1.0, bad]), torch.ones(3)
    norm, _, nonfinite = grad_stats([(spoiled, counts), (healthy, True)], WORLD, norm_type=norm_type).to_host()
    assert (norm, nonfinite) == (math.inf, 1)


def test_zeros_are_counted_where_the_norm_is() -> None:
    grads = [(torch.tensor([0.0, 1.0, 0.0]), True), (torch.zeros(5), False), (torch.tensor(0.0), True)]
    assert grad_stats(grads, WORLD, count_zeros=True).to_host() == (1.0, 3.0, 0)
    assert math.isnan(grad_stats(grads, WORLD).num_zeros.item())


def test_no_gradient_at_all() -> None:
    assert grad_stats([], WORLD, count_zeros=True).to_host() == (0.0, 0.0, 0)
    assert clip_grad_norm_([], 1.0, WORLD).item() == 0.0


def test_impossible_arguments() -> None:
    with pytest.raises(ConfigError, match="norm_type is 1"):
        grad_stats([], WORLD, norm_type=1.0)
    with pytest.raises(ConfigError, match="max_norm is 0"):
        clip_grad_norm_([], 0.0, WORLD)


def test_the_device_is_asked_once() -> None:
    """On a GPU each of these calls would stop the host until the device is done."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Reads() as reads:
        clip_grad_norm_([(g, i != 1) for i, g in enumerate(gradients())], 0.1, WORLD)
    assert reads.names == []


# --------------------------------------------------------------------------------------------- many ranks

LAYOUTS = {
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 dp2": {"tensor_model_parallel_size": 2},
    "dp4": {},
    "tp4": {"tensor_model_parallel_size": 4},
    "cp2 pp2": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
CUT, WHOLE, TIED = ParamLayout((8, 6), 0), ParamLayout((6,)), ParamLayout((8, 6), 0, shared=True)
SINKS = ParamLayout((8,), 0)


def local_gradients(mesh: Mesh) -> list[tuple[torch.Tensor, bool]]:
    """A cut matrix, a replicated vector, a cut one, and on the last stage a tied copy of the first stage's matrix."""
    parts = tuple(((8 // mesh.tp.size * r, 8 // mesh.tp.size * (r + 1)),) for r in range(mesh.tp.size))
    grads = []
    for layout in (CUT, WHOLE, SINKS, TIED):
        if layout.dim is not None:
            layout = dataclasses.replace(layout, parts=parts, rank=mesh.tp.rank)
        if layout.shared and not (mesh.pp.size > 1 and mesh.pp.is_last):
            continue
        stage = 0 if layout.shared else mesh.pp.rank
        full = torch.randn(layout.shape, generator=torch.Generator().manual_seed(100 * stage + sum(layout.shape)))
        grads.append((layout.take(full), counts_here(layout, mesh)))
    return grads


def norm_on_ranks(rank: int, world: int, layout: dict, norm_type: float) -> tuple[float, float, int, list]:
    mesh = Mesh.build(ParallelConfig(**layout))
    with trace.record() as log:
        stats = grad_stats(local_gradients(mesh), mesh.world, norm_type=norm_type, count_zeros=True).to_host()
    return *stats, [(e.name, e.nbytes) for e in log.select(kind="comm")]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_each_element_counts_once_in_the_world(layout: dict, norm_type: float) -> None:
    results = shared_pool(4).run(norm_on_ranks, layout, norm_type, timeout=60)
    stages = layout.get("pipeline_model_parallel_size", 1)
    logical = [
        torch.randn(shape.shape, generator=torch.Generator().manual_seed(100 * stage + sum(shape.shape)))
        for stage in range(stages)
        for shape in (CUT, WHOLE, SINKS)
    ]
    want = torch.cat([g.flatten() for g in logical]).double().norm(norm_type).item()
    assert all(r[0] == pytest.approx(want, rel=1e-12) for r in results)
    assert len({r[:3] for r in results}) == 1, "every rank must hold the same bits"
    assert results[0][3] == [("all_reduce", 24)] + [("all_reduce", 8)] * (norm_type == math.inf)


def one_bad_rank(rank: int, world: int, layout: dict, bad_rank: int) -> tuple[float, float, int]:
    mesh = Mesh.build(ParallelConfig(**layout))
    grads = local_gradients(mesh)
    if rank == bad_rank:
        grads[-1][0].view(-1)[0] = math.nan
    return grad_stats(grads, mesh.world).to_host()


@pytest.mark.parametrize("bad_rank", range(4))
def test_one_bad_rank_is_seen_by_all(bad_rank: int) -> None:
    results = shared_pool(4).run(one_bad_rank, LAYOUTS["tp2 pp2"], bad_rank, timeout=60)
    assert [(r[0], r[2]) for r in results] == [(math.inf, 1)] * 4
