"""What ranks were given is compared when they meet, and what differs is named with its values."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.errors import ConfigError, DeadlineError
from minimegatron.launch.agreement import agree, differences, require_agreement
from minimegatron.launch.ledger import Ledger


@pytest.mark.parametrize(
    ("everybody", "said"),
    [
        ([{"lr": 1e-3}] * 3 + [{"lr": 2e-3}], ["lr is 0.001 on ranks 0-2 and 0.002 on rank 3"]),
        ([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}], ["b is x on rank 0 and y on rank 1"]),
        ([{"a": 1}, {"a": 2}, {"a": 3}], ["a is 1 on rank 0, 2 on rank 1 and 3 on rank 2"]),
        ([{"a": None, "b": 1}, {"b": 1}], ["a is None on rank 0 and absent on rank 1"]),
        ([{"a": True}, {"a": 1}], ["a is True on rank 0 and 1 on rank 1"]),
        ([{"a": [1, 2]}, {"a": [1, 2]}], []),
    ],
)
def test_what_differs_is_named_with_its_values_and_ranks(everybody: Any, said: list[str]) -> None:
    assert differences(everybody) == said


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=4))
def test_something_is_said_exactly_where_facts_differ(everybody: list[dict[str, int]]) -> None:
    absent = object()
    names = {name for name in "abc" if len({facts.get(name, absent) for facts in everybody}) > 1}
    assert [text.partition(" ")[0] for text in differences(everybody)] == sorted(names)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"f7 is 0 on rank 0 and 1 on rank 1; and 2 more\n"):
        require_agreement([{f"f{k}": rank for k in range(10)} for rank in range(2)])


def meet(everybody: list[dict[str, Any]], seconds: float = 20.0) -> list[str]:
    """What each rank, a thread, got from `agree`."""
    store, said = dist.HashStore(), [""] * len(everybody)

    def rank(r: int) -> None:
        try:
            agree(Ledger(store, r, len(everybody)), everybody[r], seconds)
        except (ConfigError, DeadlineError) as error:
            said[r] = f"{type(error).__name__}: {error.what}"

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(everybody))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_ranks_that_agree_go_on_and_others_all_say_the_same() -> None:
    assert meet([{"seed": 1, "lr": 0.1}, {"lr": 0.1, "seed": 1}, {"seed": 1, "lr": 0.1}]) == [""] * 3
    same = "ConfigError: the ranks were not given the same: seed is 1 on ranks 0, 2 and 2 on rank 1"
    assert meet([{"seed": 1}, {"seed": 2}, {"seed": 1}]) == [same] * 3


def test_a_rank_that_does_not_come_to_agree_is_named() -> None:
    ledger = Ledger(dist.HashStore(), 0, 2)
    with pytest.raises(DeadlineError, match="facts: rank 1 did not come within 0.1 s"):
        agree(ledger, {}, 0.1)
