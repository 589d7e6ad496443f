"""Buckets: where parameters lie, who owns what, and when each bucket travels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.linear import ColumnParallelLinear, linear
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import Init
from minimegatron.parallel.data.buckets import Span, bucket_layout
from minimegatron.parallel.data.ddp import DistributedDataParallel


@pytest.mark.parametrize(
    ("shards", "places", "buckets"),
    [
        (None, [(175, 185), (75, 175), (5, 75), (0, 5)], [(0, 175, 175), (175, 185, 10)]),
        (2, [(384, 394), (256, 356), (64, 134), (0, 5)], [(0, 256, 134), (256, 512, 138)]),
        (3, [(512, 522), (384, 484), (64, 134), (0, 5)], [(0, 384, 134), (384, 768, 138)]),
    ],
)
def test_the_layout_is_megatrons(
    shards: int | None, places: list[tuple[int, int]], buckets: list[tuple[int, int, int]]
) -> None:
    """Parameters a:10 b:100 c:70 d:5, buckets of 120; numbers of Megatron-Core 0.16.1."""
    layout = bucket_layout([10, 100, 70, 5], 120, shards)
    assert layout.params == tuple(Span(*place) for place in places)
    assert [(b.span.start, b.span.stop, b.unpadded) for b in layout.buckets] == buckets


@given(
    numels=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    size=st.one_of(st.none(), st.integers(1, 900)),
    shards=st.one_of(st.none(), st.integers(1, 5)),
    groups=st.one_of(st.none(), st.integers(0, 2**12 - 1)),
)
def test_every_element_of_a_parameter_has_one_place_and_one_owner(
    numels: list[int], size: int | None, shards: int | None, groups: int | None
) -> None:
    kinds = None if groups is None else [groups >> i & 1 for i in range(len(numels))]
    layout = bucket_layout(numels, size, shards, kinds)
    assert [i for b in layout.buckets for i in b.members] == list(reversed(range(len(numels)))), "last registered first"
    assert [place.size for place in layout.params] == numels
    places = sorted((place.start, place.stop) for place in layout.params)
    assert all(a[1] <= b[0] and (shards or a[1] == b[0]) for a, b in zip(places, places[1:], strict=False))
    for bucket in layout.buckets[:-1]:
        filled = [numels[i] for i in bucket.members]
        assert kinds is not None or (size is not None and bucket.unpadded >= size)
        assert kinds is not None or shards or bucket.unpadded - filled[-1] < (size or 0), "closed as soon as full"
        assert kinds is None or len({kinds[i] for i in bucket.members}) == 1
    if shards is None:
        return
    owned = [torch.zeros(n, dtype=torch.int64) for n in numels]
    for rank in range(shards):
        for piece in layout.pieces(rank):
            owned[piece.param][piece.of_param.slice] += 1
            assert piece.of_param.size == piece.of_buffer.size == piece.of_shard.size
            assert piece.of_buffer.start - layout.params[piece.param].start == piece.of_param.start
            assert (
                piece.of_buffer.start - layout.buckets[piece.bucket].shard(rank, shards).start == piece.of_shard.start
            )
    assert all((counts == 1).all() for counts in owned)
    assert all(bucket.span.size % shards == 0 and bucket.span.size % 128 == 0 for bucket in layout.buckets)
    assert all(place.start % 64 == 0 for place in layout.params)


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
        grads.append(ddp.grad_buffers[0].data.clone())
    return counts, grads


@pytest.mark.slow
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
    assert param.main_grad.data_ptr() == ddp.grad_buffers[0].data.data_ptr()


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
    ddp.complete = ready.append  # type: ignore[method-assign]
    for _ in range(2):
        ddp(x).square().sum().backward()
    for param, grad in zip([model.linear.weight, model.scale], want, strict=True):
        torch.testing.assert_close(param.main_grad, 2 * grad)
        assert param.grad is None
    assert sorted(ready) == 2 * ["linear.weight"] + 2 * ["scale"]


def test_a_hook_on_a_weight_sees_its_gradient_and_may_change_it():
    model, x, seen = Twice(), torch.randn(4, 2, 6), []
    initialize(model, 0)
    (want,) = torch.autograd.grad(model(x).square().sum(), [model.linear.weight])
    ddp = DistributedDataParallel(model, Mesh.serial())
    model.linear.weight.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    ddp(x).square().sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], want)
    torch.testing.assert_close(model.linear.weight.main_grad, 3 * want)


class Tied(nn.Module):
    """A weight that two products use, a bias, and a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.bias = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(10))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 100).view(10, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(torch.tanh(linear(x, self.weight, self.bias)), self.weight)


def test_a_bucket_of_one_microbatch_needs_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory begins as anything: first gradients replace it, others are added, and what got none is 0."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **how: new_empty(x, *size, **how).fill_(torch.nan))
    ddp = DistributedDataParallel(Tied(), Mesh.serial(), sharding="optim_grads")
    plain = Tied()
    for step in range(2):
        x = torch.randn(3, 10, generator=torch.Generator().manual_seed(step))
        with ddp.backward_pass():
            ddp(x).square().sum().backward()
        plain(x).square().sum().backward()
    ddp.finish_grad_sync()
    got = ddp.whole_gradients()
    assert torch.equal(got["unused"], torch.zeros(70)) and ddp.grad_buffers[0].data.isfinite().all()
    for name in ("weight", "bias"):
        torch.testing.assert_close(got[name], plain.get_parameter(name).grad)


def test_gradients_outside_of_a_pass_are_refused() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2), Mesh.serial(), sharding="optim_grads")
    ddp(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="outside of a pass; put `with ddp.backward_pass"):
        ddp.finish_grad_sync()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "no_shard"}, "drop one of the two"),
        ({"overlap_param_gather": True}, "no parameters are gathered"),
        ({"overlap_param_gather": True, "data_parallel_sharding_strategy": "optim_grads_params"}, "on use already"),
        ({"ddp_bucket_size": 9, "data_parallel_sharding_strategy": "optim_grads_params"}, "a bucket is a layer"),
        ({"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "optim"}, "shares out parameters as well"),
        (
            {"use_torch_fsdp2": True, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"},
            "those of weights come later",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig.from_dict(fields)
