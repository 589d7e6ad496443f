"""Learning rate and weight decay: Megatron's numbers to the last bit, and the rules of the closed form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.config import OptimizerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.optim.schedule import DECAY_STYLES, WSD_DECAY_STYLES, OptimizerParamScheduler, Schedule
from tests import golden

CASES = golden.load("schedule")["cases"]


def seen(groups: list[dict[str, Any]]) -> list[list[float]]:
    return [[g["lr"], g["weight_decay"]] for g in groups]


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_megatron(name: str) -> None:
    case = CASES[name]
    groups = [{}, dict(case["second_group"])]
    scheduler = OptimizerParamScheduler(groups, Schedule(**case["arguments"]))
    trace = [seen(groups)]
    for increment in case["increments"]:
        scheduler.step(increment)
        trace.append(seen(groups))
        assert scheduler.lr == groups[0]["lr"]
    assert trace == case["trace"]


schedules = st.builds(
    Schedule,
    max_lr=st.floats(0.5, 1.0),
    min_lr=st.floats(0.0, 0.5),
    init_lr=st.floats(0.0, 0.5),
    lr_warmup_steps=st.integers(0, 50),
    lr_decay_steps=st.integers(51, 400),
    lr_decay_style=st.sampled_from(DECAY_STYLES),
    wsd_decay_steps=st.integers(1, 51),
    lr_wsd_decay_style=st.sampled_from(WSD_DECAY_STYLES),
)


@given(schedules)
def test_rises_to_the_peak_then_never_rises_again_and_stays_between_floor_and_peak(schedule: Schedule) -> None:
    rates = [schedule.lr_at(n) for n in range(schedule.lr_decay_steps + 3)]
    after = rates[int(schedule.lr_warmup_steps) :]
    assert all(a <= b for a, b in zip(rates, rates[1 : int(schedule.lr_warmup_steps) + 1], strict=False))
    assert all(a >= b - 1e-15 for a, b in zip(after, after[1:], strict=False))
    assert all(schedule.min_lr - 1e-15 <= r <= schedule.max_lr + 1e-15 for r in after)
    if schedule.lr_decay_style in ("linear", "cosine", "WSD"):
        assert rates[schedule.lr_decay_steps] == pytest.approx(schedule.min_lr, abs=1e-12)


@given(schedules, st.lists(st.integers(0, 60), max_size=8))
def test_only_the_sum_of_the_increments_matters(schedule: Schedule, increments: list[int]) -> None:
    one: list[dict[str, Any]] = [{}]
    many: list[dict[str, Any]] = [{}]
    OptimizerParamScheduler(one, schedule).step(sum(increments))
    scheduler = OptimizerParamScheduler(many, schedule)
    for n in increments:
        scheduler.step(n)
    assert one == many


def make(**changes: Any) -> OptimizerParamScheduler:
    numbers = {"max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 2, "lr_decay_steps": 10, "lr_decay_style": "cosine"}
    return OptimizerParamScheduler([{}], Schedule(**{**numbers, **changes}))


def test_a_restart_continues_where_it_stopped() -> None:
    first, second = make(), make()
    first.step(5)
    second.step(3)  # a restart may have stepped already; the checkpoint's count replaces it
    second.load_state_dict(first.state_dict())
    assert second.param_groups == first.param_groups
    assert second.num_steps == 5


def test_a_changed_schedule_needs_a_decision() -> None:
    saved = make(lr_decay_steps=20)
    saved.step(6)
    with pytest.raises(CheckpointError, match=r"--train-iters\): 10 now, 20 in the checkpoint"):
        make().load_state_dict(saved.state_dict())
    ours, theirs = make(), make()
    ours.load_state_dict(saved.state_dict(), override_opt_param_scheduler=True)
    theirs.load_state_dict(saved.state_dict(), use_checkpoint_opt_param_scheduler=True)
    assert ours.lr == make().schedule.lr_at(6) == ours.param_groups[0]["lr"]
    assert theirs.lr == saved.lr == theirs.param_groups[0]["lr"]
    with pytest.raises(ConfigError):
        make().load_state_dict(
            saved.state_dict(), override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True
        )
    with pytest.raises(CheckpointError, match="lacks num_steps"):
        make().load_state_dict({k: v for k, v in saved.state_dict().items() if k != "num_steps"})


def test_what_decides_nothing_is_not_compared() -> None:
    saved = make(lr_decay_style="constant", lr_decay_steps=20, wd_incr_steps=20, lr_wsd_decay_style="linear")
    saved.step(6)
    longer = make(lr_decay_style="constant", lr_decay_steps=99, wd_incr_steps=99, min_lr=0.2)
    longer.load_state_dict(saved.state_dict())
    assert (longer.num_steps, longer.lr) == (6, 1.0)
    grows = {"start_wd": 0.1, "end_wd": 0.2, "wd_incr_style": "linear"}
    with pytest.raises(CheckpointError, match="weight decay grows .*--train-iters.: 9 now, 8 in the checkpoint"):
        make(**grows, wd_incr_steps=9).load_state_dict(make(**grows, wd_incr_steps=8).state_dict())


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_lr": 2.0},
        {"init_lr": 1.5},
        {"lr_warmup_steps": 10},
        {"lr_decay_style": "exponential"},
        {"lr_decay_style": "WSD"},
        {"lr_decay_style": "WSD", "wsd_decay_steps": 11, "lr_wsd_decay_style": "linear"},
        {"lr_decay_style": "WSD", "wsd_decay_steps": 5, "lr_wsd_decay_style": "sqrt"},
        {"start_wd": 0.2, "end_wd": 0.1, "wd_incr_style": "linear"},
        {"start_wd": 0.1, "end_wd": 0.2},
        {"wd_incr_steps": 0},
    ],
    ids=str,
)
def test_schedules_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**wrong)


def test_iterations_become_samples() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_warmup_iters=2, weight_decay=0.05)
    in_samples = Schedule.from_config(config, global_batch_size=8, train_iters=10)
    in_iters = Schedule.from_config(config, global_batch_size=1, train_iters=10)
    assert (in_samples.lr_warmup_steps, in_samples.lr_decay_steps, in_samples.wd_at(3)) == (16, 80, 0.05)
    assert [in_samples.lr_at(8 * n) for n in range(13)] == pytest.approx([in_iters.lr_at(n) for n in range(13)])


def test_lengths_in_samples_and_fractions() -> None:
    config = OptimizerConfig(lr_decay_samples=1000, lr_warmup_samples=100)
    schedule = Schedule.from_config(config, global_batch_size=8, train_iters=10, train_samples=2000)
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wd_incr_steps) == (100, 1000, 2000)
    config = OptimizerConfig(
        lr_warmup_fraction=0.01, start_weight_decay=0.0, end_weight_decay=0.1, weight_decay_incr_style="linear"
    )
    schedule = Schedule.from_config(config, global_batch_size=8, train_iters=10)
    assert schedule.lr_warmup_steps == pytest.approx(0.8)
    assert schedule.wd_at(40) == pytest.approx(0.05)
    config = OptimizerConfig(lr_decay_style="WSD", lr_wsd_decay_iters=3, lr_decay_iters=7)
    schedule = Schedule.from_config(config, global_batch_size=8, train_iters=10)
    assert (schedule.wsd_decay_steps, schedule.lr_decay_steps, schedule.wd_incr_steps) == (24, 56, 80)


def ramp(iterations: int) -> int:
    """Samples of the first iterations, the batches being 2, 4, 6, 8, 8, 8 ..."""
    return sum(min(8, 2 * n) for n in range(1, iterations + 1))


def test_iterations_of_a_ramp_up_are_counted() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_iters=3, lr_decay_style="WSD", lr_wsd_decay_iters=7)
    schedule = Schedule.from_config(config, global_batch_size=8, train_iters=9, samples_of=ramp)
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps) == (ramp(3), ramp(9))
    rates = [schedule.lr_at(ramp(n)) for n in range(10)]
    assert rates[3] == 1.0 and all(rate < 1.0 for rate in rates[:3] + rates[4:]) and rates[9] == 0.0
    assert schedule.wsd_decay_steps == ramp(9) - ramp(2), "the last 7 of 9 iterations"
    with pytest.raises(ConfigError, match="WSD decays over"):
        Schedule.from_config(config, global_batch_size=8, train_iters=6, samples_of=ramp)


def test_a_run_of_a_version_that_did_not_count_them_goes_on_as_it_began() -> None:
    def schedule(iterations: int, **counted: Any) -> Schedule:
        config = OptimizerConfig(lr=1.0, lr_warmup_iters=iterations)
        return Schedule.from_config(config, global_batch_size=8, train_iters=20, train_samples=ramp(20), **counted)

    def now(iterations: int) -> OptimizerParamScheduler:
        return OptimizerParamScheduler([{}], schedule(iterations, samples_of=ramp), before=lambda: schedule(iterations))

    began = OptimizerParamScheduler([{}], schedule(3))
    began.step(ramp(2))
    state = {name: value for name, value in began.state_dict().items() if name != "counts_ramp_up"}
    for _ in range(2):  # the second time from what the first has saved
        resumed = now(3)
        resumed.load_state_dict(state)
        assert resumed.lr == began.lr == ramp(2) / 24
        state = resumed.state_dict()
    with pytest.raises(CheckpointError, match="the warm-up"):
        now(4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the warm-up"):  # counted, 24 samples are no 3 iterations
        now(3).load_state_dict(OptimizerParamScheduler([{}], schedule(3)).state_dict())
