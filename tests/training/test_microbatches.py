"""Batch size ramp-up: Megatron's sizes, and the rules that hold for every ramp."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.errors import ConfigError
from minimegatron.training.microbatches import BatchSizeRampup, NumMicrobatches
from tests import golden


@pytest.mark.parametrize("case", golden.load("microbatches")["cases"], ids=lambda c: str(c["arguments"].values()))
def test_every_size_equals_megatron(case: dict[str, Any]) -> None:
    arguments = dict(case["arguments"])
    rampup = arguments.pop("rampup_batch_size")
    sizes = NumMicrobatches(**arguments, rampup=BatchSizeRampup(*rampup) if rampup else None)
    for consumed, scheduled, running, microbatches in case["trace"]:
        ours = sizes.scheduled_batch_size(consumed), sizes.global_batch_size_at(consumed), sizes.at(consumed)
        assert ours == (scheduled, running, microbatches), f"after {consumed} samples"


def test_the_published_ramp() -> None:
    sizes = NumMicrobatches(32, 2, 2, BatchSizeRampup(8, 8, 96))
    got = [(sizes.global_batch_size_at(c), sizes.at(c)) for c in (0, 20, 40, 64, 96, 200)]
    assert got == [(8, 2), (8, 2), (16, 4), (24, 6), (32, 8), (32, 8)]


def test_an_exact_boundary_may_be_a_step_late_and_is_made_up_for() -> None:
    sizes = NumMicrobatches(8, 1, 1, BatchSizeRampup(1, 1, 58))
    assert [sizes.at(consumed) for consumed in (57, 58, 59)] == [7, 7, 8]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 8), st.integers(0, 500))
def test_training_along_a_ramp_visits_every_size_in_order(
    micro: int, dp: int, start: int, increments: int, samples: int
) -> None:
    unit = micro * dp
    rampup = BatchSizeRampup(start * unit, unit, samples)
    sizes = NumMicrobatches((start + increments) * unit, micro, dp, rampup)
    consumed, seen = 0, []
    while consumed <= samples or not seen:
        seen.append(sizes.global_batch_size_at(consumed))
        assert sizes.at(consumed) * unit == seen[-1]
        consumed += seen[-1]
    assert seen == sorted(seen)
    assert sizes.global_batch_size_at(consumed) == sizes.global_batch_size
    assert all(rampup.start <= s <= sizes.global_batch_size for s in seen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((30, 4, 2), "30 is not a multiple of micro_batch_size"),
        ((4, 4, 2), "4 is not a multiple"),
        ((32, 4, 2, BatchSizeRampup(8, 4, 96)), "12, 20, 28 is not a multiple"),
        ((32, 2, 2, BatchSizeRampup(8, 5, 96)), "never becomes 32"),
        ((32, 2, 2, BatchSizeRampup(40, 4, 96)), "40 4 96 to global_batch_size 32"),
        ((32, 2, 2, BatchSizeRampup(8, 0, 96)), "8 0 96"),
        ((32, 0, 2), "micro_batch_size is 0"),
        ((4, 4, 2, None, True), "4 is not a multiple"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_training(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NumMicrobatches(*arguments)


def test_rounding_down_must_be_asked_for() -> None:
    sizes = NumMicrobatches(30, 4, 2, decrease_batch_size_if_needed=True)
    assert (sizes.global_batch_size_at(0), sizes.at(0)) == (24, 3)
