"""The loss scale under overflows: Megatron's trace, and what it must never do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.config import OptimizerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.optim.scaler import ConstantGradScaler, DynamicGradScaler, build_grad_scaler
from tests import golden

CASES = golden.load("scaler")["cases"]


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_megatron(name: str) -> None:
    scaler = DynamicGradScaler(**CASES[name]["arguments"])
    trace = []
    for overflow in CASES[name]["overflows"]:
        scaler.update(overflow)
        trace.append(list(scaler.state_dict().values()))
    assert trace == CASES[name]["trace"]


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_the_scale_stays_a_power_of_two_above_the_floor(overflows: list[bool], interval: int, hysteresis: int) -> None:
    scaler = DynamicGradScaler(2.0**8, 2.0, growth_interval=interval, hysteresis=hysteresis)
    for overflow in overflows:
        scaler.update(overflow)
        assert scaler.scale >= 2.0 and scaler.scale.hex().startswith("0x1.0000000000000p")


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_restart_changes_nothing(before: list[bool], after: list[bool]) -> None:
    straight, stopped = DynamicGradScaler(growth_interval=3), DynamicGradScaler(growth_interval=3)
    for overflow in before:
        straight.update(overflow)
        stopped.update(overflow)
    resumed = DynamicGradScaler(growth_interval=3)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for overflow in after:
        straight.update(overflow)
        resumed.update(overflow)
    assert resumed.state_dict() == straight.state_dict()


def test_a_constant_scale_does_not_move() -> None:
    scaler = ConstantGradScaler(128.0)
    scaler.update(True)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.scale == 128.0


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="growth_tracker, hysteresis_tracker"):
        DynamicGradScaler().load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_scale": 1.0, "min_scale": 2.0},
        {"min_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DynamicGradScaler(**wrong)


def test_which_scaler_a_run_gets() -> None:
    config = OptimizerConfig(initial_loss_scale=64.0, loss_scale_window=5, hysteresis=3, min_loss_scale=2.0)
    assert build_grad_scaler(config, fp16=False) is None
    scaler = build_grad_scaler(config, fp16=True)
    assert isinstance(scaler, DynamicGradScaler)
    assert (scaler.scale, scaler.growth_interval, scaler.hysteresis, scaler.min_scale) == (64.0, 5, 3, 2.0)
    constant = build_grad_scaler(config.replace(loss_scale=8.0), fp16=False)
    assert isinstance(constant, ConstantGradScaler) and constant.scale == 8.0
