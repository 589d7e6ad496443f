"""A share of the parameters on the host: the same weights bit for bit, and bytes where they are said to be."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimegatron.config import OptimizerConfig
from minimegatron.errors import ConfigError
from minimegatron.optim import offload
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.main_params import TorchUpdate
from minimegatron.optim.offload import first_of
from tests.optim.test_optimizer import MESH, Net, train

PLAIN = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.05, initial_loss_scale=2.0**10, loss_scale_window=2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def offloaded(fraction: float = 1.0, **fields: Any) -> OptimizerConfig:
    return dataclasses.replace(PLAIN, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, **fields)


def same_bits(a: Net, b: Net) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_those_without_offload_bit_for_bit(
    dtype: torch.dtype, fraction: float, kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "CHUNK", 30)  # some parameters to a chunk, and some larger than one
    config = offloaded(fraction, optimizer=kind, overlap_cpu_optimizer_d2h_h2d=overlap)
    whole, split = Net().to(dtype), Net().to(dtype)
    without = build_optimizer(dataclasses.replace(PLAIN, optimizer=kind), whole, MESH)
    optimizer = build_optimizer(config, split, MESH)
    assert train(whole, without, range(6)) == train(split, optimizer, range(6))
    same_bits(whole, split)
    want, got = without.state_dict()["state"], optimizer.state_dict()["state"]
    for name, tensors in want.items():
        assert got[name].keys() == tensors.keys()
        assert all(torch.equal(got[name][key], tensor) for key, tensor in tensors.items()), name


def test_the_rates_of_a_scheduler_reach_both_sides() -> None:
    nets = [Net(), Net()]
    for net, config in zip(nets, (PLAIN, offloaded(0.5)), strict=True):
        optimizer = build_optimizer(config, net, MESH)
        train(net, optimizer, range(1))
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.3, 0.2 * group["wd_mult"]
        train(net, optimizer, range(1, 2))
    same_bits(*nets)


def test_whole_parameters_until_the_fraction_is_reached() -> None:
    assert [first_of([4, 4, 2], f) for f in (0.0, 0.1, 0.4, 0.41, 0.8, 0.81, 1.0)] == [0, 1, 1, 2, 2, 3, 3]
    assert first_of([], 1.0) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_by_place(dtype: torch.dtype) -> None:
    """Groups in their order: fc1.weight (48) and fc2.weight (24) decay; half of 99 elements is reached with both."""
    optimizer = build_optimizer(offloaded(0.5), Net().to(dtype), MESH)
    half = dtype != torch.float32
    assert {owner: sum(t.numel() * t.element_size() for t in ts) for owner, ts in optimizer.held().items()} == {
        "main parameters": 4 * 27 * half,
        "moments": 8 * 27,
        "main parameters (host)": 4 * 72,
        "moments (host)": 8 * 72,
        "gradients (host)": 4 * 72,
        "parameters (host)": 2 * 72 * half,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before, after", [(1.0, 1.0), (0.5, 0.0), (0.0, 0.5)])
def test_a_run_goes_on_with_another_fraction(dtype: torch.dtype, before: float, after: float) -> None:
    straight, stopped, resumed = Net().to(dtype), Net().to(dtype), Net("norm fc2 fc1", seed=9).to(dtype)
    train(straight, build_optimizer(PLAIN, straight, MESH), range(6))
    first, second = build_optimizer(offloaded(before), stopped, MESH), build_optimizer(offloaded(after), resumed, MESH)
    train(stopped, first, range(3))
    resumed.load_state_dict(stopped.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(resumed, second, range(3, 6))
    for name, want in straight.named_parameters():
        assert torch.equal(resumed.get_parameter(name), want), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_loaded_alone_reach_the_host(dtype: torch.dtype) -> None:
    new, nets = Net(seed=9).to(dtype).state_dict(), [Net().to(dtype), Net().to(dtype)]
    for net, config in zip(nets, (PLAIN, offloaded(0.5)), strict=True):
        optimizer = build_optimizer(config, net, MESH)
        net.load_state_dict(new)
        optimizer.reload_model_params()
        train(net, optimizer, range(2))
    same_bits(*nets)


def test_the_host_works_chunk_by_chunk_only_where_copies_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK", 30)
    step, seen = TorchUpdate.step, list[list[str]]()
    monkeypatch.setattr(
        TorchUpdate, "step", lambda self, r, f: (seen.append([p.name for p, _ in r]), step(self, r, f))[1]
    )
    for overlap, want in ((False, [5]), (True, [1, 3, 1])):
        seen.clear()
        net = Net()
        train(net, build_optimizer(offloaded(0.9, overlap_cpu_optimizer_d2h_h2d=overlap), net, MESH), range(1))
        assert sorted(sum(seen, [])) == sorted(dict(net.named_parameters()))
        assert [len(names) for names in seen[1:]] == want, seen  # what is not offloaded goes first


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"optimizer": "muon"}, "Muon's products"),
        ({"optimizer": "dist_muon"}, "Muon's products"),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, "keeps fp32 on both sides"),
        ({"optimizer_offload_fraction": 1.5}, "optimizer_offload_fraction is 1.5"),
    ],
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        OptimizerConfig(optimizer_cpu_offload=True, **fields)
    assert "fix:" in str(error.value)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_the_parameters_are_those_that_megatron_offloads(fraction: float) -> None:
    """Its own choice, over two groups of stand-ins for tensors of a GPU."""
    hybrid = pytest.importorskip("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", reason="it is optional")

    class Tensor:
        dtype = torch.float32

        def __init__(self, elements: int, is_cuda: bool = True) -> None:
            self.is_cuda, self.numel = is_cuda, lambda: elements
            self.detach = self.clone = self.pin_memory = lambda: self
            self.cpu = lambda: Tensor(elements, False)

    groups = [[Tensor(n) for n in (7, 50, 3, 20)], [Tensor(n) for n in (4, 4, 12)]]
    of = SimpleNamespace(param_groups=[{"params": params} for params in groups], param_update_in_fp32=True)
    offloaded = hybrid.HybridDeviceOptimizer._get_sub_optimizer_param_groups(of, fraction)[2]
    flat = [p for params in groups for p in params]
    assert list(offloaded) == flat[: first_of([p.numel() for p in flat], fraction)]


@pytest.mark.parametrize("torchs", [False, True])
def test_the_host_and_on_demand_the_gpu_compute_by_torch(torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    init, backends = TorchUpdate.__init__, list[str]()
    monkeypatch.setattr(TorchUpdate, "__init__", lambda self, *args: (backends.append(args[2]), init(self, *args))[1])
    build_optimizer(offloaded(0.5, use_torch_optimizer_for_cpu_offload=torchs), Net(), MESH, kernels="auto")
    assert backends == ["torch", "torch" if torchs else "auto"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        dataclasses.replace(PLAIN, optimizer="sgd"),
        offloaded(0.5),
        dataclasses.replace(PLAIN, use_precision_aware_optimizer=True, exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16"),
    ],
    ids=["adam", "sgd", "offload", "low precision"],
)
def test_a_model_without_memory_has_the_same_bytes(dtype: torch.dtype, config: OptimizerConfig) -> None:
    """What a planner counts."""
    held = [build_optimizer(config, Net().to(dtype).to(device), MESH).held() for device in ("cpu", "meta")]
    real, planned = ({owner: [(t.shape, t.dtype) for t in ts] for owner, ts in one.items()} for one in held)
    assert planned == real
    assert all(t.is_meta for tensors in held[1].values() for t in tensors)


def test_megatrons_line_with_both_flags_is_taken() -> None:
    """Megatron asks for `--use-precision-aware-optimizer` with offload; in fp32 it changes nothing."""
    nets = [Net().bfloat16(), Net().bfloat16()]
    for net, config in zip(nets, (offloaded(0.5), offloaded(0.5, use_precision_aware_optimizer=True)), strict=True):
        train(net, build_optimizer(config, net, MESH), range(2))
    same_bits(*nets)
