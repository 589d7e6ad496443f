"""The optimizer's step: torch's optimizers as the oracle, overflow, state by name, one decision on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from labkit.ranks.pool import shared_pool
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.errors import CheckpointError, NumericsError
from minimegatron.layers.param import ParamLayout
from minimegatron.models.chunks import build_stage
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.optimizer import MixedPrecisionOptimizer, StepResult
from minimegatron.parallel.data.data_parallel import Shard

MESH = Mesh.serial()


class Net(nn.Module):
    """A matrix, biases and a norm; `order` is the order of registration, which must not matter."""

    def __init__(self, order: str = "fc1 norm fc2", seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        modules = {"fc1": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "fc2": nn.Linear(8, 3)}
        for name in modules:  # drawn in one order, registered in another
            for param in modules[name].parameters():
                param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        for name in order.split():
            self.add_module(name, modules[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.norm(self.fc1(x))))


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(16, 6, generator=generator)
    y = torch.randn(16, 3, generator=generator)
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype)).float() - y).square().mean()


def train(
    net: nn.Module,
    optimizer: MixedPrecisionOptimizer,
    steps: range,
    spoil: Callable[[nn.Module, int], None] | None = None,
) -> list[StepResult]:
    results = []
    for step in steps:
        optimizer.zero_grad()
        optimizer.scale_loss(loss_of(net, step)).backward()
        if spoil:
            spoil(net, step)
        results.append(optimizer.step())
    return results


def torch_twin(config: OptimizerConfig, net: nn.Module) -> torch.optim.Optimizer:
    """The textbook optimizer: two groups by hand, nothing fused."""
    decayed = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, config.sgd_momentum, foreach=False, fused=False)
    return torch.optim.AdamW(groups, config.lr, (config.adam_beta1, config.adam_beta2), config.adam_eps, foreach=False)


def same(a: nn.Module, b: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(a.named_parameters(), dict(b.named_parameters()).values(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_equals_torch(kind: str, clip: float, momentum: float) -> None:
    config = OptimizerConfig(
        optimizer=kind, lr=0.02, weight_decay=0.3, clip_grad=clip, adam_beta2=0.95, sgd_momentum=momentum
    )
    ours, theirs = Net(), Net()
    results = train(ours, build_optimizer(config, ours, MESH), range(8))
    twin = torch_twin(config, theirs)
    for step, result in enumerate(results):
        twin.zero_grad()
        loss_of(theirs, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        twin.step()
        assert result.successful and result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    same(ours, theirs)


def test_no_weight_decay_on_biases_and_vectors() -> None:
    net = Net()
    net.fc1.bias = nn.Parameter(torch.randn(4, 2).view(8))
    net.table = nn.Parameter(torch.ones(4, 4))
    net.odd = nn.Module()
    net.odd.bias = nn.Parameter(torch.ones(2, 2))  # named a bias, though not 1-D
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), net, MESH)
    decay, no_decay = optimizer.param_groups
    names = {p.data_ptr(): n for n, p in net.named_parameters()}
    assert {names[p.data_ptr()] for p in decay["params"]} == {"fc1.weight", "fc2.weight", "table"}
    assert {names[p.data_ptr()] for p in no_decay["params"]} == {
        *("fc1.bias", "fc2.bias", "norm.weight", "norm.bias", "odd.bias"),
    }
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert (decay["wd_mult"], no_decay["wd_mult"]) == (1.0, 0.0)


def test_biases_of_experts_do_not_decay() -> None:
    """They are stacked, so each has a dim more than a bias has."""
    sizes = {"num_experts": 4, "add_bias_linear": True, "softmax_type": "learnable"}
    model = build_stage(TransformerConfig(**sizes), MESH)
    decay, no_decay = build_optimizer(OptimizerConfig(weight_decay=0.1), model, MESH).param_groups
    names = {p.data_ptr(): n.rpartition(".")[2] for n, p in model.named_parameters()}
    assert {names[p.data_ptr()] for p in decay["params"]} == {"weight", "weight1", "weight2"}
    assert {names[p.data_ptr()] for p in no_decay["params"]} == {"weight", "bias", "bias1", "bias2", "softmax_offset"}


def test_main_grad_is_read_before_grad_and_frozen_parameters_are_left_alone() -> None:
    net, config = Net(), OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    net.fc2.weight.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for param in net.parameters():
        param.main_grad, param.grad = torch.full(param.shape, 0.5), torch.full(param.shape, 77.0)
    build_optimizer(config, net, MESH).step()
    for name, param in net.named_parameters():
        moved = 0.0 if name == "fc2.weight" else 0.5
        torch.testing.assert_close(param, before[name] - moved, msg=name)


def test_parameters_without_a_gradient_stay() -> None:
    net = Net()
    before = net.fc2.weight.detach().clone()
    optimizer = build_optimizer(OptimizerConfig(), net, MESH)
    net.fc1(torch.ones(1, 6)).sum().backward()
    assert optimizer.step().successful
    assert torch.equal(net.fc2.weight, before)


# --------------------------------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_add_up_in_fp32(dtype: torch.dtype) -> None:
    """A thousandth of a bf16 ulp, a thousand times, must move the weight."""
    net = nn.Linear(1, 1, bias=False, dtype=dtype)
    net.weight.data.fill_(1.0)
    step_size = torch.finfo(dtype).eps / 1000
    config = OptimizerConfig(optimizer="sgd", lr=step_size, sgd_momentum=0.0, weight_decay=0.0, loss_scale=1.0)
    optimizer = build_optimizer(config, net, MESH)
    for _ in range(1500):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    assert net.weight.item() == 1.0 - 1.5 * torch.finfo(dtype).eps


def test_fp16_overflow_skips_lowers_the_scale_and_recovers() -> None:
    config = OptimizerConfig(lr=0.01, initial_loss_scale=2.0**16, loss_scale_window=3, hysteresis=1)
    net = Net().half()
    optimizer = build_optimizer(config, net, MESH)
    frozen: dict[int, list[torch.Tensor]] = {}

    def spoil(net: nn.Module, step: int) -> None:
        if step in (2, 3):
            net.fc1.weight.grad.view(-1)[5] = math.inf if step == 2 else math.nan
        frozen[step] = [p.detach().clone() for p in net.parameters()]

    results = train(net, optimizer, range(9), spoil)
    assert [r.successful for r in results] == [True, True, False, False, True, True, True, True, True]
    assert [r.found_inf for r in results] == [not r.successful for r in results]
    assert [r.loss_scale for r in results] == [2.0**16] * 3 + [2.0**15] + [2.0**14] * 3 + [2.0**15] * 2
    for skipped in (2, 3):  # weights and moments as if the step had not been
        assert all(torch.equal(a, b) for a, b in zip(frozen[skipped], frozen[skipped + 1], strict=True))
        assert results[skipped].grad_norm is None
    assert optimizer.state_dict()["state"]["fc1.weight"]["step"].item() == 7


def test_the_scale_leaves_the_step_unchanged() -> None:
    """Powers of two only move the exponent: the same weights to the last bit, with and without clipping."""
    for clip in (0.05, 0.0):
        finals = []
        for scale in (None, 2.0**10):
            config = OptimizerConfig(lr=0.01, clip_grad=clip, loss_scale=scale)
            net = Net()
            results = train(net, build_optimizer(config, net, MESH), range(4))
            finals.append((list(net.parameters()), [r.grad_norm for r in results]))
        assert finals[0][1] == finals[1][1]
        assert all(torch.equal(a, b) for a, b in zip(finals[0][0], finals[1][0], strict=True))


# --------------------------------------------------------------------------------------------- not finite


def spoil_fc2(net: nn.Module, step: int) -> None:
    net.fc2.bias.grad[1] = math.nan


def test_without_a_scaler_a_nan_stops_before_anything_moves() -> None:
    net = Net()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = build_optimizer(OptimizerConfig(), net, MESH)
    with pytest.raises(NumericsError, match="1 gradient tensors") as error:
        train(net, optimizer, range(1), spoil_fc2)
    assert "fc2.bias" in error.value.where and "fc1" not in error.value.where
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert optimizer.state_dict()["state"]["fc1.weight"]["step"].item() == 0


def test_or_skips_the_step_if_told_so() -> None:
    net = Net()
    optimizer = build_optimizer(OptimizerConfig(check_for_nan_in_loss_and_grad=False), net, MESH)
    before = [p.detach().clone() for p in net.parameters()]
    (result,) = train(net, optimizer, range(1), spoil_fc2)
    assert result == StepResult(False, None, None, True, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert train(net, optimizer, range(1, 2))[0].successful


def test_zeros_are_reported_when_asked_for() -> None:
    net = Net()
    (result,) = train(net, build_optimizer(OptimizerConfig(log_num_zeros_in_grad=True), net, MESH), range(1))
    assert result.num_zeros == sum(int((p.grad == 0).sum()) for p in net.parameters())
    assert train(net, build_optimizer(OptimizerConfig(), net, MESH), range(1))[0].num_zeros is None


# --------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_follows_names_not_positions(kind: str, dtype: torch.dtype) -> None:
    """Stop after three steps, resume in a model registered in another order, and end with the same bits."""
    config = OptimizerConfig(optimizer=kind, lr=0.01, initial_loss_scale=2.0**12, loss_scale_window=2)
    straight, stopped = Net().to(dtype), Net().to(dtype)
    whole = build_optimizer(config, straight, MESH)
    train(straight, whole, range(6))
    first = build_optimizer(config, stopped, MESH)
    train(stopped, first, range(3))

    resumed = Net("norm fc2 fc1", seed=9).to(dtype)
    resumed.load_state_dict(stopped.state_dict())
    second = build_optimizer(config, resumed, MESH)
    second.load_state_dict(first.state_dict())
    train(resumed, second, range(3, 6))
    for name, want in straight.named_parameters():
        assert torch.equal(resumed.get_parameter(name), want), name
    assert second.loss_scale == whole.loss_scale


def test_loading_the_state_of_a_16_bit_model_brings_its_weights() -> None:
    stopped, other = Net().bfloat16(), Net(seed=9).bfloat16()
    first, second = (build_optimizer(OptimizerConfig(), net, MESH) for net in (stopped, other))
    train(stopped, first, range(2))
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(stopped.parameters(), other.parameters(), strict=True))


def test_state_is_complete_before_the_first_step() -> None:
    """A checkpoint is loaded into tensors that must exist already."""
    fresh, used = Net().bfloat16(), Net().bfloat16()
    optimizer = build_optimizer(OptimizerConfig(), used, MESH)
    train(used, optimizer, range(2))

    def shapes(o: MixedPrecisionOptimizer) -> dict:
        return {n: {k: (v.shape, v.dtype) for k, v in t.items()} for n, t in o.state_dict()["state"].items()}

    assert shapes(build_optimizer(OptimizerConfig(), fresh, MESH)) == shapes(optimizer)
    assert shapes(optimizer)["fc1.weight"].keys() == {"step", "exp_avg", "exp_avg_sq", "fp32_param"}


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    net = Net()
    optimizer = build_optimizer(OptimizerConfig(), net, MESH)
    train(net, optimizer, range(1))
    good = optimizer.state_dict()
    state = good["state"]
    before = {n: {k: v.clone() for k, v in t.items()} for n, t in state.items()}
    missing = {n: t for n, t in state.items() if n != "fc1.bias"}
    renamed = {n.replace("fc2", "fc_2"): t for n, t in state.items()}
    reshaped = {**state, "fc1.weight": {**state["fc1.weight"], "exp_avg": torch.zeros(8, 5)}}
    half = {**state, "fc1.weight": {**state["fc1.weight"], "fp32_param": torch.zeros(8, 6)}}
    for wrong, message in [
        (missing, "missing fc1.bias"),
        (renamed, r"unexpected fc_2.weight did you mean `fc2.weight`"),
        (reshaped, r"fc1.weight has"),
        (half, "fp32_param"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict({**good, "state": wrong})
    with pytest.raises(CheckpointError, match="dynamic loss scale"):
        optimizer.load_state_dict({**good, "grad_scaler": {"scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": 2}})
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])


def test_reload_model_params() -> None:
    net = Net().bfloat16()
    optimizer = build_optimizer(OptimizerConfig(), net, MESH)
    net.fc1.weight.data.fill_(3.0)
    optimizer.reload_model_params()
    main = {p.name: p.main for p in optimizer.params}
    assert main["fc1.weight"].dtype == torch.float32
    assert (main["fc1.weight"] == 3.0).all()


def test_a_wrapped_model_and_a_list_of_chunks_have_the_same_names() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    chunks = [nn.ModuleDict({"a": nn.Linear(2, 2)}), Wrapper(nn.ModuleDict({"b": nn.Linear(2, 2)}))]
    names = build_optimizer(OptimizerConfig(), chunks, MESH).state_dict()["state"].keys()
    assert names == {"a.weight", "a.bias", "b.weight", "b.bias"}


# --------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_owners_of_pieces_together_take_the_whole_step(dtype: torch.dtype, ranks: int) -> None:
    """What a sharded optimizer needs: each owner updates its range, and the gather of the ranges is the plain step."""
    config = OptimizerConfig(lr=0.02, weight_decay=0.3, clip_grad=0.0)
    plain, sharded = Net().to(dtype), Net().to(dtype)
    owners = []
    for rank in range(ranks):
        bounds = {
            n: (p.numel() * rank // ranks, p.numel() * (rank + 1) // ranks) for n, p in sharded.named_parameters()
        }
        flat = {n: p.detach().view(-1) for n, p in sharded.named_parameters()}
        shards = {
            n: Shard(slice(a, b), torch.zeros(b - a, dtype=dtype), flat[n][a:b])
            for n, (a, b) in bounds.items()
            if b > a
        }
        owners.append((build_optimizer(config, sharded, MESH, shards), shards))
    whole = build_optimizer(config, plain, MESH)
    for step in range(4):
        train(plain, whole, range(step, step + 1))
        sharded.zero_grad()
        loss_of(sharded, step).backward()
        grads = {n: p.grad.view(-1) for n, p in sharded.named_parameters()}
        for owner, shards in owners:
            for name, shard in shards.items():
                shard.grad.copy_(grads[name][shard.piece])
            owner.step()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        # Not to the bit: torch's fused CPU kernel rounds the last elements of a tensor differently from the others.
        torch.testing.assert_close(p, q, rtol=0, atol=2e-7 if dtype == torch.float32 else 1e-2)
    held = sum(t["exp_avg"].numel() for o, _ in owners for t in o.state_dict()["state"].values())
    assert held == sum(p.numel() for p in plain.parameters())


def test_a_tied_copy_is_updated_but_not_counted() -> None:
    net = nn.Linear(3, 2, bias=False)
    net.weight.param_layout = ParamLayout((2, 3), shared=True)
    config = OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0)
    before = net.weight.detach().clone()
    net.weight.grad = torch.ones(2, 3)
    assert build_optimizer(config, net, MESH).step().grad_norm == 0.0
    torch.testing.assert_close(net.weight.detach(), before - 1.0)


# ----------------------------------------------------------------------------------------------------- several ranks


LAYOUT = {"tensor_model_parallel_size": 2}  # four ranks: tp 2, dp 2


def raise_on_one(rank: int, world: int, bad_rank: int) -> str:
    """fp32 without a scaler; the message, or "stepped"."""
    mesh = Mesh.build(ParallelConfig(**LAYOUT))
    net = nn.Linear(3, 3)
    net.weight.grad, net.bias.grad = torch.ones(3, 3), torch.ones(3)
    if rank == bad_rank:
        net.bias.grad[0] = math.inf
    before = net.weight.detach().clone()
    try:
        build_optimizer(OptimizerConfig(), net, mesh).step()
    except NumericsError as error:
        assert torch.equal(net.weight, before)
        return error.where
    return "stepped"


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_all_ranks_stop_together(bad_rank: int) -> None:
    where = shared_pool(4).run(raise_on_one, bad_rank, timeout=60)
    assert all(w.startswith(f"rank {r} at") for r, w in enumerate(where))
    assert ["bias" in w for w in where] == [r == bad_rank for r in range(4)]


def skip_on_one(rank: int, world: int) -> list[tuple[bool, float | None, float, float]]:
    """fp16: per step what happened, the scale after it, and a weight."""
    mesh = Mesh.build(ParallelConfig(**LAYOUT))
    net = nn.Linear(3, 3, bias=False, dtype=torch.float16)
    net.weight.data.fill_(1.0)
    config = OptimizerConfig(lr=0.1, initial_loss_scale=8.0, hysteresis=1, loss_scale_window=2, clip_grad=0.0)
    optimizer = build_optimizer(config, net, mesh)
    seen = []
    for step in range(4):
        net.weight.grad = torch.full((3, 3), 2.0, dtype=torch.float16)
        if step == rank == 1:
            net.weight.grad[0, 0] = math.nan
        result = optimizer.step()
        seen.append((result.successful, result.grad_norm, optimizer.loss_scale, net.weight[1, 1].item()))
    return seen


def test_all_ranks_skip_together_and_keep_one_scale() -> None:
    results = shared_pool(4).run(skip_on_one, timeout=60)
    assert all(r == results[0] for r in results)
    assert [s[0] for s in results[0]] == [True, False, True, True]
    assert [s[1] for s in results[0]] == [0.75, None, 1.5, 1.5]  # sqrt(9 * 2 * 2) / scale
    assert [s[2] for s in results[0]] == [8.0, 4.0, 4.0, 8.0]
    assert results[0][0][3] == results[0][1][3] > results[0][2][3] > results[0][3][3]


def frozen_stage(rank: int, world: int) -> tuple[bool, float | None, float]:
    """The second pipeline stage has nothing to train."""
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=2))
    net = nn.Linear(2, 2, bias=False)
    net.weight.requires_grad_(mesh.pp.is_first)
    net.weight.grad = torch.full((2, 2), 1.5) if mesh.pp.is_first else None
    before = net.weight.detach().clone()
    result = build_optimizer(OptimizerConfig(), net, mesh).step()
    return result.successful, result.grad_norm, (net.weight - before).abs().max().item()


def test_a_stage_without_trainable_parameters_takes_part() -> None:
    results = shared_pool(4).run(frozen_stage, timeout=60)
    assert [r[:2] for r in results] == [(True, 3.0)] * 4
    assert [r[2] > 0 for r in results] == [True, True, False, False]
