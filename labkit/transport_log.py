"""The broker's log of every communication, in order."""

from __future__ import annotations

import dataclasses
from typing import Any

from minimegatron.errors import DataError

MAX_ENTRIES = 50_000  # of one rank


@dataclasses.dataclass
class Entry:
    """One communication of one rank, or a mark that a check has set.

    Attributes:
        rank: the rank.
        name: as in torch.distributed; `mark` for a mark.
        group: global ranks of its group.
        peer: the other rank of a send or receive, within the group; -1 otherwise.
        op: the reduction (`sum`); the text of a mark.
        sent, received: bytes.
        started: number of the start in the order of all events of all ranks.
        waited: number of the first wait for it in the same order; None if it was never waited for.
        at, waited_at: the number of torch's operations that the rank says it had done then.
    """

    rank: int
    name: str
    group: tuple[int, ...]
    peer: int
    op: str
    started: int
    at: int
    sent: int = 0
    received: int = 0
    waited: int | None = None
    waited_at: int = 0


class Log:
    """Entries of all ranks, with one counter for all events."""

    def __init__(self, ranks: int) -> None:
        self.entries: dict[int, list[Entry]] = {rank: [] for rank in range(ranks)}
        self._number = 0
        self._last = dict.fromkeys(self.entries, 0)

    def start(self, rank: int, name: str, group: tuple[int, ...], at: Any, peer: int = -1, op: str = "") -> Entry:
        """Log a start.

        Raises:
            DataError: the rank has more entries than allowed.
        """
        if len(self.entries[rank]) >= MAX_ENTRIES:
            raise DataError(f"rank {rank} makes more than {MAX_ENTRIES} communications")
        entry = Entry(rank, name, group, peer, op, self._next(), self._position(rank, at))
        self.entries[rank].append(entry)
        return entry

    def wait(self, entry: Entry, at: Any) -> None:
        """Log that the rank waits for it; only the first wait counts."""
        if entry.waited is None:
            entry.waited, entry.waited_at = self._next(), self._position(entry.rank, at)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _position(self, rank: int, at: Any) -> int:
        """The rank's own count of its operations; it never decreases."""
        self._last[rank] = max(self._last[rank], at if type(at) is int and 0 <= at < 1 << 40 else 0)
        return self._last[rank]

    def to_plain(self) -> list[list[list[Any]]]:
        """For each rank, its entries as lists of their attributes."""
        # `dataclasses.astuple` copies deeply, which took a quarter of the broker's time
        return [[list(vars(entry).values()) for entry in self.entries[rank]] for rank in sorted(self.entries)]
