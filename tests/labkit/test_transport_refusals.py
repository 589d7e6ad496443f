"""What does not fit together is said in words; who stands still is told; what is forged is not believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labkit.transport import Transport
from labkit.transport_log import Entry

from minimegatron.errors import DataError
from minimegatron.launch.error_report import is_consequence, timed_out
from tests.labkit.lines import Ranks

pytestmark = pytest.mark.thorough

_CALL = "call 1 of group [0, 1] is not the same on its ranks: "
SAID = {
    "other_collective": f"{_CALL}rank 0 calls all_reduce(float32 [4]), rank 1 calls broadcast(float32 [4], root 0)",
    "other_shape": f"{_CALL}rank 0 calls all_reduce(float32 [4, 2]), rank 1 calls all_reduce(float32 [5, 2])",
    "other_dtype": f"{_CALL}rank 0 calls all_reduce(float32 [4]), rank 1 calls all_reduce(float64 [4])",
    "rows_beside_counts": f"{_CALL}rank 0 calls all_to_all(int64, gives [1, 1], takes [1, 1] rows), rank 1 calls "
    "all_to_all(float32, gives [2, 0], takes [2, 0] rows)",
    "other_operation": "call 2 of group [0, 1] is not the same on its ranks: rank 0 calls all_reduce(float32 [4]), "
    "rank 1 calls all_reduce(float32 [4], max)",
    "other_root": f"{_CALL}rank 0 calls broadcast(float32 [4], root 0), rank 1 calls broadcast(float32 [4], root 1)",
    "splits_that_differ": "all_to_all of group [0, 1]: rank 0 sends 2 rows to rank 1, which expects 1 from it",
    "other_groups": "the ranks do not create the same groups in the same order: rank 0 creates one of the ranks "
    "[0, 1], rank 1 creates one of the ranks [1, 0]",
    "small_buffer": "rank 0 sends 16 bytes (float32 [4]) to rank 1, whose buffer has 8 (float32 [2])",
    "all_send_first": "deadlock: rank 0 waits in send to rank 1; rank 1 waits in send to rank 0",
    "other_order": "deadlock: rank 0 waits in all_reduce of group [0, 1] for rank 1; rank 1 waits in all_reduce of "
    "group [0, 1] for rank 0",
    "other_tag": "deadlock: rank 0 waits in send to rank 1 with tag 3; rank 1 waits in recv from rank 0 with tag 4",
    "waits_for_a_key": "deadlock: rank 0 waits in a wait for the key '0//never' of the store for rank 1; rank 1 "
    "waits in barrier of group [0, 1] for rank 0",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.mark.parametrize("name", SAID)
def test_both_sides_are_named(ranks: Ranks, name: str) -> None:
    said, _ = ranks.run("tests.labkit.talks:one_wrong", 2, name=name)
    assert said == [f"RuntimeError: {SAID[name]}"] * 2
    assert not is_consequence(RuntimeError(said[0])), "this is a cause"


def test_who_ended_is_named(ranks: Ranks) -> None:
    said, _ = ranks.run("tests.labkit.talks:one_wrong", 2, name="dies")
    assert said[0] == "RuntimeError: all_reduce of group [0, 1]: rank 1 has ended"
    assert is_consequence(RuntimeError(said[0])), "rank 1 knows the cause"
    said, _ = ranks.run("tests.labkit.talks:one_wrong", 2, name="returns_early")
    assert said == ["RuntimeError: recv from rank 1: rank 1 has returned", None]
    assert not is_consequence(RuntimeError(said[0])), "and rank 1 has nothing to say"


def test_a_timeout_is_kept(ranks: Ranks) -> None:
    said, _ = ranks.run("tests.labkit.talks:one_wrong", 2, name="short_timeout")
    assert said[0] == "RuntimeError: barrier of group [0, 1] timed out after 300 ms" and timed_out(said[0])


def test_who_computes_is_in_no_deadlock(ranks: Ranks) -> None:
    assert ranks.run("tests.labkit.talks:computes_long", 2)[0] == [3.0, 2.0]


def test_a_chain_is_told_to_all(ranks: Ranks) -> None:
    said, _ = ranks.run("tests.labkit.talks:three_in_a_row", 3)
    assert len(set(said)) == 1
    for piece in (
        "rank 0 waits in all_reduce of group [0, 1, 2] for ranks 1-2",
        "rank 1 waits in recv from rank 2;",
        "rank 2 waits in recv from any rank for any of ranks 0-1",
    ):
        assert piece in said[0]


@given(counts=st.integers(2, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n)))  # fmt: skip
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_splits(ranks: Ranks, counts: list[list[int]]) -> None:
    said, _ = ranks.run("tests.labkit.talks:exchanged", len(counts), counts=counts)
    for rank, one in enumerate(said):
        want = [10.0 * i + rank for i, row in enumerate(counts) for _ in range(row[rank])]
        assert torch.equal(one, torch.tensor(want).view(-1, 1).expand(-1, 2))


def test_the_log_has_the_order(ranks: Ranks) -> None:
    said, evidence = ranks.run("tests.labkit.talks:starts_and_waits", 2)
    assert said == [None, None]
    names = [field.name for field in dataclasses.fields(Entry)]
    entries = [[dict(zip(names, entry, strict=True)) for entry in one] for one in evidence["entries"]]
    assert [entry["name"] for entry in entries[1]] == ["all_reduce", "all_reduce", "mark", "send", "recv"]
    never, work, mark, *_ = entries[0]
    assert never["waited"] is None and never["received"] == 16, "it was complete, and nobody looked"
    assert never["started"] < work["started"] < mark["started"] < work["waited"] and mark["op"] == "between"
    assert (work["sent"], work["received"], work["group"]) == (8, 8, [0, 1])
    receive = entries[0][-1]
    assert (receive["peer"], receive["received"], receive["sent"]) == (1, 4, 0), "the source is known in the end"
    numbers = [e[key] for one in entries for e in one for key in ("started", "waited") if e[key] is not None]
    assert len(set(numbers)) == len(numbers), "one order for all ranks"
    assert evidence["unclaimed"] == [[0, 1, 9, 12]]


def test_a_small_message_counts_what_it_has_and_a_tag_for_eight_bytes(ranks: Ranks) -> None:
    said, evidence = ranks.run("tests.labkit.talks:small_messages", 2)
    assert said == [None, None]
    assert [Entry(*entry).sent for entry in evidence["entries"][0]] == [4, 8, 12, 8]


def test_what_is_forged_is_refused(ranks: Ranks) -> None:
    said, evidence = ranks.run("tests.labkit.talks:own_frames", 2)
    for found in said:
        assert isinstance(found, list), found
        assert len(found) == 31 and all("Error: " in one for one in found), found
    assert [entry[1] for entry in evidence["entries"][0]] == ["all_reduce"]


def test_bytes_that_wait_are_limited(ranks: Ranks) -> None:
    said, _ = ranks.run("tests.labkit.talks:never_waits", 2, most_held=256 << 20)
    assert said[0] == "RuntimeError: rank 0 has started communications of more than 256 MiB and waited for none"


def test_all_that_the_store_is_told_counts() -> None:
    transport = Transport(2)
    asked = {"do": "keys", "id": 1, "verb": "set", "names": ["k" * 100]}
    transport.handle(0, asked, [torch.zeros(5, dtype=torch.uint8)])
    [[entry], []] = transport.evidence()["entries"]
    assert Entry(*entry).sent == 8 + 100 + 5
    transport.handle(1, {"do": "keys", "id": 1, "verb": "get", "names": ["k" * 100]}, [])
    assert Entry(*transport.evidence()["entries"][1][0]).received == 5
    assert transport._held == {0: 0, 1: 0}, "what the store gives makes no room for more"
    with pytest.raises(DataError, match="beyond 64 bits"):
        transport.handle(0, {"do": "keys", "id": 2, "verb": "add", "names": ["n"], "amount": 1 << 4000}, [])


def test_groups_that_some_make_are_seen() -> None:
    transport = Transport(2)
    for rank, ranks in ((0, [0, 1]), (1, [1, 0])):
        transport.handle(rank, {"do": "group", "id": 1, "name": "a", "ranks": ranks}, [])
    assert "do not create the same groups" in transport.evidence()["out_of_step"]
    waiting = Transport(2)
    waiting.handle(0, {"do": "group", "id": 1, "name": "a", "ranks": [0, 1]}, [])
    assert "make a group that others do not" in waiting.evidence()["out_of_step"]
