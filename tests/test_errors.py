"""Words that many messages share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minimegatron.errors import did_you_mean, named, ranges


@given(st.sets(st.integers(0, 30)))
def test_ranges_read_back(numbers: set[int]) -> None:
    back: set[int] = set()
    for part in filter(None, ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        back.update(range(int(first), int(last or first) + 1))
    assert back == numbers
    assert ranges([0, 1, 2, 5]) == "0-2, 5"


def test_ranks_are_named_in_the_singular_and_the_plural() -> None:
    assert (named([3]), named([0, 1, 2, 5])) == ("rank 3", "ranks 0-2, 5")


def test_a_slip_is_mended_and_another_word_is_not() -> None:
    assert did_you_mean("--tran-iters", ["--train-iters", "--seed"]) == "did you mean `--train-iters`?"
    assert did_you_mean("layers", ["num_layers", "seed"]) == "did you mean `num_layers`?"
    assert did_you_mean("lr_decay", ["weight_decay", "clip_grad"]) == ""
