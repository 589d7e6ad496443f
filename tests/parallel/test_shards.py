"""Shards of buckets: Megatron's layout, and every element owned once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.wgrad import PlainProducts
from minimegatron.parallel.data.buckets import Span, bucket_layout
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.units import leaves_of, units_of


@pytest.mark.parametrize(
    ("shards", "places", "buckets"),
    [
        (2, [(384, 394), (256, 356), (64, 134), (0, 5)], [(0, 256, 134), (256, 512, 138)]),
        (3, [(512, 522), (384, 484), (64, 134), (0, 5)], [(0, 384, 134), (384, 768, 138)]),
    ],
)
def test_the_layout_is_megatrons(
    shards: int, places: list[tuple[int, int]], buckets: list[tuple[int, int, int]]
) -> None:
    """Parameters a:10 b:100 c:70 d:5, buckets of 120; numbers of Megatron-Core 0.16.1."""
    layout = bucket_layout([10, 100, 70, 5], 120, shards)
    assert layout.params == tuple(Span(*place) for place in places)
    assert [(b.span.start, b.span.stop, b.unpadded) for b in layout.buckets] == buckets


@given(
    numels=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    size=st.one_of(st.none(), st.integers(1, 900)),
    shards=st.integers(1, 5),
    groups=st.one_of(st.none(), st.integers(0, 2**12 - 1)),
)
def test_every_element_of_a_parameter_has_one_owner(
    numels: list[int], size: int | None, shards: int, groups: int | None
) -> None:
    kinds = None if groups is None else [groups >> i & 1 for i in range(len(numels))]
    layout = bucket_layout(numels, size, shards, kinds)
    owned = [torch.zeros(n, dtype=torch.int64) for n in numels]
    for rank in range(shards):
        for piece in layout.pieces(rank):
            bucket = layout.buckets[piece.bucket]
            owned[piece.param][piece.of_param.slice] += 1
            assert piece.of_param.size == piece.of_buffer.size == piece.of_shard.size
            assert piece.of_buffer.start - layout.params[piece.param].start == piece.of_param.start
            assert piece.of_buffer.start - bucket.shard(rank, shards).start == piece.of_shard.start
    assert all((counts == 1).all() for counts in owned)
    for bucket in layout.buckets:
        assert bucket.span.size % shards == 0 and bucket.span.size % 128 == 0
        assert kinds is None or len({kinds[i] for i in bucket.members}) == 1
    assert all(place.start % 64 == 0 for place in layout.params)


class Net(nn.Module):
    is_stage = True

    def __init__(self, kind: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.decoder = nn.Module()
        self.decoder.layers = kind
        self.decoder.norm = nn.LayerNorm(3)


@pytest.mark.parametrize("named", [False, True])
def test_a_unit_is_a_layer_or_what_is_in_no_list(named: bool) -> None:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    net = Net(nn.ModuleDict({"7": layers[0], "8": layers[1]}) if named else nn.ModuleList(layers))
    outside, first, second = units_of(net)
    assert outside.module is net and first.module is layers[0] and second.module is layers[1]
    assert [p.shape for p in outside.params] == [(4, 3), (3,), (3,)]
    assert [m for m, _ in leaves_of(outside)] == [net.embedding, net.decoder.norm]
    assert [m for m, _ in leaves_of(first)] == [first.module]


class Tied(nn.Module):
    """A weight that two products use, a bias, and a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.bias = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(10))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 100).view(10, 10))
        self.products = PlainProducts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.linear(torch.tanh(self.products.linear(x, self.weight, self.bias)), self.weight)


def test_a_bucket_of_one_microbatch_needs_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory begins as anything: first gradients replace it, others are added, and what got none is 0."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **how: new_empty(x, *size, **how).fill_(torch.nan))
    ddp = DistributedDataParallel(Tied(), Mesh.serial(), sharding="optim_grads")
    plain = Tied()
    for _ in range(2):
        x = torch.randn(3, 10)
        with ddp.backward_pass():
            ddp(x).square().sum().backward()
        plain(x).square().sum().backward()
    ddp.finish_grad_sync()
    got = ddp.whole_gradients()
    assert torch.equal(got["unused"], torch.zeros(70)) and ddp.buffer.data.isfinite().all()
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
