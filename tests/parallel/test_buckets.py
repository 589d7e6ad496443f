"""The gradient buffer: layout, order of departure, one launch per bucket and step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minimegatron import trace
from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import Init
from minimegatron.layers.wgrad import fusing_sink
from minimegatron.parallel.data.buckets import Span, bucket_layout
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.grad_buffer import GradBuffer, Replicated


def test_the_frozen_layout():
    """Parameters a:10 b:100 c:70 d:5, buckets of 120: d, c, b share the first, which closes at 175."""
    layout = bucket_layout([10, 100, 70, 5], 120)
    assert layout.params == (Span(175, 185), Span(75, 175), Span(5, 75), Span(0, 5))
    assert [(b.span, b.members) for b in layout.buckets] == [(Span(0, 175), (3, 2, 1)), (Span(175, 185), (0,))]


@given(numels=st.lists(st.integers(1, 50), min_size=1, max_size=20), size=st.one_of(st.none(), st.integers(1, 200)))
def test_layout_properties(numels, size):
    layout = bucket_layout(numels, size)
    spans, buckets = layout.params, [(b.span, b.members) for b in layout.buckets]
    covered = sorted((s.start, s.stop) for s in spans)
    assert covered[0][0] == 0 and covered[-1][1] == sum(numels)
    assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False)), "no hole, no overlap"
    assert [s.stop - s.start for s in spans] == numels
    order = [i for _, members in buckets for i in members]
    assert order == list(reversed(range(len(numels)))), "last registered first"
    for span, members in buckets:
        assert span == Span(spans[members[0]].start, spans[members[-1]].stop)
    if size is not None:
        assert all(s.stop - s.start >= size for s, _ in buckets[:-1])
        assert all(s.stop - s.start - numels[m[-1]] < size for s, m in buckets), "closed as soon as it was full"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == skip else torch.tanh(layer(x))
        return x


def launches(rank: int, world: int, overlap: bool, skip_on: int | None) -> tuple[list, list]:
    mesh = Mesh.build(ParallelConfig())
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), mesh, bucket_size=16, overlap=overlap)
    counts, grads = [], []
    for step in range(2):
        ddp.zero_grad_buffer()
        with trace.record(rank) as log:
            for last in (False, True):
                x = torch.full((2, 4), float(rank + step + 1))
                if last:
                    ddp(x, skip=2 if rank == skip_on else None).sum().backward()
                else:
                    with ddp.no_sync():
                        ddp(x).sum().backward()
                    early = log.count("all_reduce")
            before_finish = log.count("all_reduce")
            ddp.finish_grad_sync()
            counts.append((early, before_finish, log.count("all_reduce"), log.nbytes("all_reduce")))
        grads.append(ddp.buffer.data.clone())
    return counts, grads


@pytest.mark.parametrize("skip_on", [None, 1])
def test_each_bucket_travels_once_a_step_and_only_for_the_last_microbatch(ranks, skip_on):
    """Also when one rank never computes a gradient that the other does: both start the buckets in the same order."""
    pool = ranks(2)
    with_overlap = pool.run(launches, True, skip_on)
    without = pool.run(launches, False, skip_on)
    for counts, _ in with_overlap:
        for early, _, total, nbytes in counts:
            assert (early, total, nbytes) == (0, 5, 5 * 16 * 4)
    for counts, _ in without:
        assert counts == [(0, 0, 1, 5 * 16 * 4)] * 2
    for (_, a), (_, b) in zip(with_overlap, without, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(with_overlap[0][1], with_overlap[1][1], strict=True))


def test_main_grads_are_views_and_accumulate_in_fp32():
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    ddp = DistributedDataParallel(nn.ParameterList([param]), Mesh.serial())
    for _ in range(1000):
        param.sum().backward()
    assert param.grad is None and param.main_grad.item() == 1000.0
    assert param.main_grad.data_ptr() == ddp.buffer.data.data_ptr()


def test_a_bucket_cannot_travel_twice():
    params = [("a", nn.Parameter(torch.ones(2)))]
    buffer = GradBuffer(params, bucket_layout([2], None), Replicated, Mesh.serial().dp, ALONE, torch.float32)
    buffer.buckets[0].start()
    with pytest.raises(AssertionError, match="once at a time"):
        buffer.buckets[0].start()


class Twice(torch.nn.Module):
    """A linear layer used twice, as one would share an output layer, and a weight that no product computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = ColumnParallelLinear(6, 6, Mesh.serial().tp, init=Init(std=0.5), bias=False)
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x) * self.scale)


def test_products_add_to_the_buffer_and_a_bucket_waits_for_the_last_use():
    model, x = Twice(), torch.randn(4, 2, 6)
    initialize(model, 0)
    want = torch.autograd.grad(model(x).square().sum(), [model.linear.weight, model.scale])
    ddp = DistributedDataParallel(model, Mesh.serial(), bucket_size=1, overlap=True)
    ready: list[str] = []
    ddp.ready = lambda names: ready.extend(names)  # type: ignore[method-assign]
    for _ in range(2):
        ddp(x).square().sum().backward()
    for param, grad in zip([model.linear.weight, model.scale], want, strict=True):
        torch.testing.assert_close(param.main_grad, 2 * grad)
        assert param.grad is None
    assert sorted(ready) == 2 * ["linear.weight"] + 2 * ["scale"]


def test_a_gradient_of_another_dtype_is_not_fused():
    model = ColumnParallelLinear(6, 6, Mesh.serial().tp, init=Init(std=0.5), bias=False, dtype=torch.bfloat16)
    initialize(model, 0)
    DistributedDataParallel(model, Mesh.serial())
    assert fusing_sink(model.weight) is None and model.weight.main_grad.dtype == torch.float32


def test_a_hook_on_a_weight_sees_its_gradient_and_may_change_it():
    model, x, seen = Twice(), torch.randn(4, 2, 6), []
    initialize(model, 0)
    (want,) = torch.autograd.grad(model(x).square().sum(), [model.linear.weight])
    ddp = DistributedDataParallel(model, Mesh.serial())
    model.linear.weight.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    ddp(x).square().sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], want)
    torch.testing.assert_close(model.linear.weight.main_grad, 3 * want)
