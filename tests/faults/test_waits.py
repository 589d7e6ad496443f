"""Whichever way a rank waits, it is known that it waits, in which communication, and who did not come."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from labkit.ranks.torchrun import launch
from minimegatron.errors import DeadlineError
from tests.faults import chain, helpers

ALL = list(chain.WAYS)
CHAIN = helpers.VICTIM.with_name("chain.py")


def test_a_deadline_of_warm_ranks_says_who_kept_whom_waiting_and_in_what(ranks: Any) -> None:
    last = len(ALL)
    with pytest.raises(DeadlineError) as caught:
        ranks(last + 1, fingerprints=False).run(chain.wait_for_the_next, ALL, timeout=5)
    assert caught.value.what.startswith(f"rank {last} kept ranks 0-{last - 1} waiting: wait_for_the_next")
    late, *others = caught.value.where.split("; ")
    assert late.startswith(f"rank {last} is at chain.py:") and late.endswith("time.sleep(seconds)")
    for rank, (way, line) in enumerate(zip(ALL, others, strict=True)):
        assert line.startswith(f"rank {rank} waits in {chain.said(way, rank)} at chain.py:"), way


def test_another_thread_of_a_rank_sees_what_it_waits_in(ranks: Any, tmp_path: Path) -> None:
    seen = ranks(len(ALL) + 1, fingerprints=False).run(chain.seen_by_a_thread, ALL, str(tmp_path), timeout=60)
    assert seen == [*(chain.said(way, rank) for rank, way in enumerate(ALL)), ""]


@pytest.mark.parametrize(
    "ways",
    [
        ["shared memory", "ring", "all_to_all"],
        pytest.param(["p2p", "reduce_scatter", "objects"], marks=pytest.mark.thorough),
        pytest.param(["all_gather", "p2p", "all_reduce"], marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_torchrun_names_the_collective_and_the_rank_at_the_end_of_the_chain(tmp_path: Path, ways: list[str]) -> None:
    run = launch(CHAIN, 4, tmp_path, timeout=90, args=ways, env={"TIMEOUT": "3"})
    assert run.returncode == 7, run.explain() + "".join(run.stderr)
    found = re.search(r"DeadlineError: (.* over .* \(ranks (\d)-\d\)): rank (\d) did not come", run.explain())
    assert found, run.explain()
    rank = int(found[2])
    assert found[1] == chain.said(ways[rank], rank) and int(found[3]) == rank + 1
    assert ("did not come, which waits for rank 3, within 3 s" in run.explain()) == (rank < 2)
    assert "rank 3 is at chain.py:" in run.explain() and "in wait_for_the_next: time.sleep(seconds)" in run.explain()
