"""AdamW on state of 8 and 16 bits: its formula in float64, what rounding may change, what a checkpoint holds.

Gradients are given, not computed, where two optimizers are compared: only the optimizers differ then.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from minimegatron.config import OptimizerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.optim import precision_aware
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.precision_aware import DTYPES, RANGE, Remainder, Stored, scale_of
from tests.optim.test_optimizer import MESH, Net, train

PLAIN = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.0, adam_beta2=0.95, loss_scale=64.0)
AWARE = dataclasses.replace(PLAIN, use_precision_aware_optimizer=True)
# name -> mantissa bits, exponent of the smallest normal number, what the largest magnitude is scaled to
FORMATS = {"bf16": (7, -126, None), "fp16": (10, -14, 65504 / 2), "fp8": (3, -6, 448.0)}
MOMENTS = ["bf16", "fp16", "fp8"]
COMBINATIONS = [
    {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"},
    {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "main_params_dtype": "fp16"},
    {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "bf16", "store_param_remainders": False},
    {},
]


def give(net: nn.Module, step: int) -> None:
    """The gradients of a step: of several magnitudes in a tensor, other ones each time."""
    generator = torch.Generator().manual_seed(1000 + step)
    for number, p in enumerate(net.parameters()):
        spread = 10.0 ** (2 * torch.rand(p.shape, generator=generator) - 4 - number % 2)
        p.main_grad = 64.0 * torch.randn(p.shape, generator=generator) * spread


def stepped(net: nn.Module, config: OptimizerConfig, steps: int = 12) -> MixedPrecisionOptimizer:
    optimizer = build_optimizer(config, net, MESH)
    for step in range(steps):
        give(net, step)
        assert optimizer.step().successful
    return optimizer


def state_of(optimizer: MixedPrecisionOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    return optimizer.state_dict()["state"]


def aware(**dtypes: Any) -> OptimizerConfig:
    return dataclasses.replace(AWARE, **dtypes)


# ------------------------------------------------------------------------------------------- fp32 everywhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remainders", [True, False])
def test_in_fp32_it_is_adamw_to_the_last_bit(dtype: torch.dtype, remainders: bool) -> None:
    nets = [Net().to(dtype), Net().to(dtype)]
    want, got = stepped(nets[0], PLAIN), stepped(nets[1], aware(store_param_remainders=remainders))
    for name, tensors in state_of(want).items():
        assert state_of(got)[name].keys() == tensors.keys()
        assert all(torch.equal(state_of(got)[name][key], tensor) for key, tensor in tensors.items()), name
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


# ------------------------------------------------------------------------------------- the formula in float64


def rounded(x: torch.Tensor, name: str, positive: bool = False) -> torch.Tensor:
    """A float64 tensor in a format and back, by arithmetic; a power of two scales it."""
    if name == "fp32":
        return x.float().double()
    bits, lowest, most = FORMATS[name]
    scale = 1.0 if most is None or not x.any() else 2.0 ** math.ceil(math.log2(x.abs().max().item() / most))
    y = x / scale
    ulp = 2.0 ** (torch.frexp(y)[1].double() - 1).clamp(min=lowest) * 2.0**-bits
    y = torch.round(y / ulp) * ulp  # half to even
    least = 2.0 ** (lowest - bits)
    return torch.where(x > 0, y.clamp(min=least), y) * scale if positive and most is not None else y * scale


def reference(net: nn.Module, config: OptimizerConfig, steps: int = 12) -> dict[str, dict[str, torch.Tensor]]:
    """The trajectory in float64: only what is kept between steps is rounded."""
    found = {}
    for name, p in net.named_parameters():
        w = p.detach().double()
        found[name] = {"w": w, "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
    b1, b2 = config.adam_beta1, config.adam_beta2
    for step in range(1, steps + 1):
        give(net, step - 1)
        for name, p in net.named_parameters():
            of, g = found[name], p.main_grad.double() / 64
            m, v = b1 * of["exp_avg"] + (1 - b1) * g, b2 * of["exp_avg_sq"] + (1 - b2) * g * g
            decay = config.weight_decay if p.dim() > 1 else 0.0
            move = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + config.adam_eps)
            of["w"] = of["w"] * (1 - config.lr * decay) - config.lr * move
            if p.dtype != torch.float32:
                of["w"] = rounded(of["w"], config.main_params_dtype)
            of["exp_avg"] = rounded(m, config.exp_avg_dtype)
            of["exp_avg_sq"] = rounded(v, config.exp_avg_sq_dtype, positive=True)
    return found


def steps_apart(got: torch.Tensor, want: torch.Tensor, name: str) -> torch.Tensor:
    """In units of the format at the wanted number."""
    bits, lowest, most = FORMATS[name]
    scale = 1.0 if most is None else 2.0 ** math.ceil(math.log2(want.abs().max().item() / most))
    ulp = 2.0 ** (torch.frexp(want / scale)[1].double() - 1).clamp(min=lowest) * 2.0**-bits * scale
    return (got.double() - want).abs() / ulp


def against_reference(config: OptimizerConfig) -> float:
    """Of the moments, the share that is another number of the format than the reference's; none is two steps off."""
    net = Net().bfloat16()
    want = reference(Net().bfloat16(), config)
    optimizer = stepped(net, config)
    apart: list[torch.Tensor] = []
    for name, tensors in state_of(optimizer).items():
        for key in ("exp_avg", "exp_avg_sq"):
            dtype = getattr(config, f"{key}_dtype")
            if dtype != "fp32":
                apart.append(steps_apart(tensors[key], want[name][key], dtype).flatten())
    off = torch.cat(apart)
    return (off > 0.5).double().mean().item() if off.max() < 2 else 1.0


@pytest.mark.parametrize("first", ["fp32", *MOMENTS])
@pytest.mark.parametrize("second", ["fp32", *MOMENTS])
def test_moments_are_those_of_the_formula(first: str, second: str) -> None:
    """fp32 differs from float64 by 2^-24, so a number seldom lands on the other side of a boundary of rounding."""
    if {first, second} != {"fp32"}:
        assert against_reference(aware(exp_avg_dtype=first, exp_avg_sq_dtype=second)) < 0.02


@pytest.mark.parametrize("fault", ["cut", "no scale", "a scale too large", "scale of the last step"])
def test_another_rounding_or_scale_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, write = precision_aware.scale_of, precision_aware.Stored.write
    if fault == "cut":  # towards zero, by one bit less
        monkeypatch.setattr(precision_aware.Stored, "write", lambda self, x: write(self, x * (1 - 2.0**-6)))
    elif fault == "scale of the last step":
        last: dict[tuple[int, ...], torch.Tensor] = {}

        def late(x: torch.Tensor, most: float) -> torch.Tensor:
            now, before = right(x, most), last.get(tuple(x.shape))
            last[tuple(x.shape)] = now
            return (now if before is None else before).clone()

        monkeypatch.setattr(precision_aware, "scale_of", late)
    else:
        factor = {"no scale": 0.0, "a scale too large": 4096.0}[fault]
        wrong = (lambda x, most: right(x, most) * factor) if factor else (lambda x, most: torch.ones(()))
        monkeypatch.setattr(precision_aware, "scale_of", wrong)
    assert against_reference(aware(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")) > 0.02


@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=str)
def test_main_parameters_are_those_of_the_formula(dtypes: dict[str, Any]) -> None:
    config = aware(**dtypes)
    net, want = Net().bfloat16(), reference(Net().bfloat16(), config)
    optimizer = stepped(net, config)
    for name, tensors in state_of(optimizer).items():
        main = tensors["fp32_param"]
        # a moment on the other side of a boundary moves a weight by lr times a step of the format, twice over its life
        step = 2.0**-3 if "fp8" in dtypes.values() else 2.0**-7
        limit = 12 * config.lr * step * 0.25 + (
            2.0**-10 * main.abs().max().item() if config.main_params_dtype == "fp16" else 1e-6
        )
        assert (main.double() - want[name]["w"]).abs().max() < limit
        assert torch.equal(net.get_parameter(name), main.bfloat16())


# ------------------------------------------------------------------------------------ how far it is from fp32


@pytest.mark.parametrize(
    "dtype, beta2, shrinks",
    [("bf16", 0.999, False), ("fp8", 0.999, False), ("bf16", 0.95, True), ("fp16", 0.999, True), ("fp32", 0.999, True)],
)
def test_where_a_second_moment_does_not_shrink(dtype: str, beta2: float, shrinks: bool) -> None:
    """Without gradients, by less than half the distance to the next number."""
    net = nn.Linear(16, 16, bias=False)
    optimizer = build_optimizer(aware(exp_avg_sq_dtype=dtype, adam_beta2=beta2), net, MESH)
    net.weight.main_grad = 64 * (1 + torch.rand(16, 16, generator=torch.Generator().manual_seed(0)))
    optimizer.step()
    before = state_of(optimizer)["weight"]["exp_avg_sq"].clone()
    for _ in range(3):
        net.weight.main_grad = torch.zeros(16, 16)
        optimizer.step()
    after = state_of(optimizer)["weight"]["exp_avg_sq"]
    assert (after < before).all() if shrinks else torch.equal(after, before)


def test_a_row_whose_gradients_end_does_not_explode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's v is rounded to 0 long before its m: m / (0 + eps). Numbers that are not 0 do not become 0."""

    def largest_move() -> float:
        net = nn.Linear(4, 2, bias=False)
        optimizer = build_optimizer(aware(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", weight_decay=0.0), net, MESH)
        moves = []
        for step in range(6):
            before = net.weight.detach().clone()
            net.weight.main_grad = torch.ones(2, 4) * torch.tensor([[1.0], [1e-4 * (step == 0)]])
            optimizer.step()
            moves.append((net.weight - before).abs().max().item())
        return max(moves) / AWARE.lr

    assert largest_move() < 2
    init = precision_aware.Stored.__init__
    monkeypatch.setattr(precision_aware.Stored, "__init__", lambda self, x, dtype, positive=False: init(self, x, dtype))
    assert largest_move() > 20


# ------------------------------------------------------------------------------------------ bytes, checkpoints


@pytest.mark.parametrize(
    "dtype, dtypes, main, moments",
    [
        (torch.bfloat16, {}, 2, 8),
        (torch.bfloat16, {"store_param_remainders": False}, 4, 8),
        (torch.bfloat16, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 2, 4),
        (torch.bfloat16, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "main_params_dtype": "fp16"}, 2, 3),
        (torch.float16, {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, 4, 2),
        (torch.float16, {"exp_avg_dtype": "fp16", "main_params_dtype": "fp16"}, 2, 6),
        (torch.float32, {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"}, 0, 3),
    ],
)
def test_bytes_per_parameter(dtype: torch.dtype, dtypes: dict[str, Any], main: int, moments: int) -> None:
    net = Net().to(dtype)
    elements = sum(p.numel() for p in net.parameters())
    held = stepped(net, aware(**dtypes), 1).held()
    assert {owner: sum(t.nbytes for t in tensors) for owner, tensors in held.items()} == {
        "main parameters": main * elements,
        "moments": moments * elements,
    }


@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_run_goes_on_as_if_it_had_not_stopped(dtypes: dict[str, Any], dtype: torch.dtype) -> None:
    """The state goes through fp32 and comes back as it was kept; the resumed model has another order."""
    if dtype == torch.float32:
        dtypes = {k: v for k, v in dtypes.items() if k != "main_params_dtype"}
    config = aware(**dtypes)
    straight, stopped = Net().to(dtype), Net().to(dtype)
    whole, first = build_optimizer(config, straight, MESH), build_optimizer(config, stopped, MESH)
    train(straight, whole, range(6))
    train(stopped, first, range(3))
    saved = copy.deepcopy(first.state_dict())
    assert all(t.dtype == torch.float32 for tensors in saved["state"].values() for t in tensors.values())
    resumed = Net("norm fc2 fc1", seed=9).to(dtype)
    resumed.load_state_dict(stopped.state_dict())
    second = build_optimizer(config, resumed, MESH)
    second.load_state_dict(saved)
    train(resumed, second, range(3, 6))
    for name, want in straight.named_parameters():
        assert torch.equal(resumed.get_parameter(name), want), name
    for name, tensors in state_of(whole).items():
        assert all(torch.equal(state_of(second)[name][key], tensor) for key, tensor in tensors.items()), name


def test_the_state_of_adamw_is_taken_over_and_of_another_model_is_not() -> None:
    before, after = Net().bfloat16(), Net(seed=9).bfloat16()
    plain, low = stepped(before, PLAIN, 3), build_optimizer(aware(exp_avg_dtype="bf16"), after, MESH)
    low.load_state_dict(plain.state_dict())
    for name, tensors in state_of(plain).items():
        assert torch.equal(state_of(low)[name]["exp_avg"], tensors["exp_avg"].bfloat16().float())
        assert torch.equal(state_of(low)[name]["fp32_param"], tensors["fp32_param"])
        assert torch.equal(after.get_parameter(name), before.get_parameter(name))
    with pytest.raises(CheckpointError, match="fc1.bias"):
        low.load_state_dict({"state": {"fc1.bias": {}}, "grad_scaler": {}})


def test_weights_that_are_loaded_alone_become_main_parameters() -> None:
    for dtypes in COMBINATIONS:
        net = Net().bfloat16()
        optimizer = stepped(net, aware(**dtypes), 2)
        net.load_state_dict(Net(seed=9).bfloat16().state_dict())
        optimizer.reload_model_params()
        for name, tensors in state_of(optimizer).items():
            limit = 2.0**-11 * tensors["fp32_param"].abs().max() if dtypes.get("main_params_dtype") else 0.0
            assert (tensors["fp32_param"] - net.get_parameter(name).float()).abs().max() <= limit


# ------------------------------------------------------------------------------------------------- the step


def test_parameters_are_taken_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as one parameter, with the same result."""
    config, nets, calls = aware(exp_avg_dtype="fp8"), [Net().bfloat16(), Net().bfloat16()], []
    stepped(nets[0], config, 3)
    move = precision_aware.PrecisionAware._move
    monkeypatch.setattr(precision_aware, "BATCH", 9)
    monkeypatch.setattr(
        precision_aware.PrecisionAware, "_move", lambda *args: (calls.append(len(args[2])), move(*args))[1]
    )
    stepped(nets[1], config, 3)
    assert sorted(calls) == sorted([1] * 3 * 2 + [1] * 3 * 4)
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype='bf16' without use_precision_aware_optimizer"),
        ({"main_grads_dtype": "bf16"}, "main_grads_dtype='bf16' without"),
        ({"use_precision_aware_optimizer": True, "optimizer": "sgd"}, "optimizer='sgd'"),
        ({"use_precision_aware_optimizer": True, "optimizer": "muon"}, "optimizer='muon'"),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "bf16"}, "'fp32', 'fp16'"),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "int8"}, "'fp8'"),
    ],
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        OptimizerConfig(**fields)
    assert "fix:" in str(error.value)


# ---------------------------------------------------------------------------------------------------- stored numbers


STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}  # the most that rounding changes a number by, of itself
LOW = [name for name in DTYPES if name != "fp32"]


def numbers(seed: int, spread: float = 2.0, magnitude: float = 1e-6) -> torch.Tensor:
    """Both signs, over several powers of ten, some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4000, generator=generator) * 10.0 ** (spread * torch.rand(4000, generator=generator))
    x[::97] = 0.0
    return x * magnitude


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("magnitude", [1e-12, 1e-4, 1.0, 1e6])
def test_rounding_changes_a_number_by_at_most_half_a_step(name: str, magnitude: float) -> None:
    x = numbers(0, magnitude=magnitude)
    off = (Stored(x, DTYPES[name]).read().double() - x.double()).abs()
    if name == "fp8":  # numbers far below the largest one have fewer bits
        off = torch.where(x.abs() > x.abs().max() * 2.0**-14, off, 0.0)
    assert 0.9 * STEP[name] < (off / x.double().abs().clamp(min=1e-300)).max() <= STEP[name]


@pytest.mark.parametrize("name", LOW)
def test_what_is_read_and_kept_again_is_the_same(name: str) -> None:
    for seed in range(20):
        kept = Stored(numbers(seed, spread=6.0, magnitude=10.0**-seed), DTYPES[name], positive=False)
        once = kept.read().clone()
        kept.write(once)
        assert torch.equal(kept.read(), once)


@pytest.mark.parametrize("most", RANGE.values())
def test_the_scale_is_the_smallest_power_of_two_that_is_enough(most: float) -> None:
    for largest in (most, math.nextafter(most, 0), most * 1.0001, 1e-20, 3e-7, 1.0, 1e20, most * 2.0**-100):
        scale = scale_of(torch.tensor([0.0, -largest, largest / 3]), most).item()
        assert math.frexp(scale)[0] == 0.5
        assert largest <= most * scale * (1 + 2**-23) and largest > most * scale / 2 * (1 - 2**-23)
    assert scale_of(torch.zeros(3), most) == 1 and scale_of(torch.zeros(0), most) == 1


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_a_second_moment_that_is_not_zero_stays_so(name: str) -> None:
    x = torch.tensor([1.0, 1e-9, 1e-15, 0.0])
    assert (Stored(x, DTYPES[name]).read() > 0).tolist() == [True, name == "fp16", False, False]
    kept = Stored(x, DTYPES[name], positive=True)
    assert (kept.read() > 0).tolist() == [True, True, True, False]
    once = kept.read().clone()
    kept.write(once)
    assert torch.equal(kept.read(), once)


def test_a_weight_and_its_remainder_are_the_main_parameter() -> None:
    """All lower halves, of numbers of either sign, of the largest and the smallest ones."""
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in (0x3F80, 0x3F81, 0x3FFF, 0x0000, 0x0001, 0x7F00, 0x4049):
        for sign in (0, -(1 << 31)):
            x = ((upper << 16) + lower + sign).view(torch.float32)
            main = Remainder(torch.zeros(1 << 16, dtype=torch.bfloat16))
            main.write(x)
            assert torch.equal(main.read().view(torch.int32), x.view(torch.int32))
            tie = lower == 1 << 15
            assert torch.equal(main.weight[~tie], x.bfloat16()[~tie])
            away = x[tie].abs() < main.weight[tie].abs().float()
            assert away.all() and main.data.dtype == torch.int16
