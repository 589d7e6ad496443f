"""The records of all ranks, read back into calls that can be compared.

A record is that of `launch/flight_dump`, or torch's own of NCCL, which has no lines of user code and no waits: there
the first call that is not complete counts as one. Clocks of machines are corrected by their offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from minimegatron.errors import ranges

Dump = Mapping[str, Any]
_SHAPES_MAY_DIFFER = ("all_to_all", "all_gather_v", "gather", "scatter", "barrier")  # by design, or there are none
_SHORT = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8",
}  # fmt: skip


class Call(NamedTuple):
    """An entry of a rank, as far as it is compared.

    Attributes:
        rank: whose.
        record: its place among all calls of the rank.
        group: name of the process group and its ranks.
        number: its place among the collectives of the group, or the messages of the edge.
        op: name of the operation.
        axis: what the group is for.
        shape, dtype, extra: of its input; of a message, of the tensor.
        sends: for a message whether it is sent; None for a collective.
        place: the line of user code.
        site: the innermost lines of the stack outside of `comm`, by which two calls are told apart.
        created: nanoseconds, on the clock of the first rank.
        waits: the rank waits for it.
        comparable: whether shapes must agree.
    """

    rank: int
    record: int
    group: tuple[str, tuple[int, ...]]
    number: int
    op: str
    axis: str
    shape: str
    dtype: str
    extra: str
    sends: bool | None
    place: str
    site: str
    created: int
    waits: bool
    comparable: bool

    @property
    def what(self) -> tuple[str, str, str, str]:
        """What must agree between ranks."""
        return (
            "" if self.sends is not None else self.op,
            self.shape if self.comparable else "",
            self.dtype,
            self.extra,
        )

    @property
    def step(self) -> tuple[str, str, str]:
        """What it is in the program: the operation, the axis, the line."""
        return (self.op, self.axis, self.site)

    @property
    def beside(self) -> bool:
        """Whether a thread beside the training makes it, so that its place among the other calls means nothing."""
        return self.axis == "checkpoint"

    @property
    def named(self) -> str:
        """`all_reduce #17 over tp (ranks 0-1)`, `message #3 from rank 0 to rank 1 over pp`."""
        ranks = self.group[1]
        if self.sends is None:
            return f"{self.op} #{self.number} over {self.axis} (ranks {ranges(ranks)})"
        other = next(rank for rank in ranks if rank != self.rank)
        ends = (self.rank, other) if self.sends else (other, self.rank)
        return f"message #{self.number} from rank {ends[0]} to rank {ends[1]} over {self.axis}"

    @property
    def tensor(self) -> str:
        return " ".join(filter(None, (self.shape, self.dtype, self.extra)))

    @property
    def at(self) -> str:
        return f" at {self.place}" if self.place else ""


class Records:
    """The records of all ranks that have left one.

    Args:
        dumps: those of `launch/flight_dump`, by rank.
        world: how many ranks there are; default those of the dumps say.

    Attributes:
        calls: the calls of each rank, oldest first.
        world: number of ranks.
    """

    def __init__(self, dumps: Mapping[int, Dump], world: int | None = None) -> None:
        self.dumps = dict(sorted(dumps.items()))
        ranks = [r for dump in dumps.values() for pg in dump["pg_config"].values() for r in _ranks(pg["ranks"])]
        self.world = world or max([*dumps, *ranks], default=-1) + 1
        # Of a rank that was killed only the innermost line of a call is known.
        lines = 1 if any("partial" in dump for dump in dumps.values()) else None
        self.calls = {rank: list(_calls(rank, dump, lines)) for rank, dump in self.dumps.items()}
        self._by_number = {
            rank: {(call.group, call.sends, call.number): call for call in calls} for rank, calls in self.calls.items()
        }
        self.groups = {call.group for calls in self.calls.values() for call in calls}

    def call(self, rank: int, like: Call, number: int | None = None) -> Call | None:
        """The call of a rank in the same group, with the same number or another."""
        number = like.number if number is None else number
        sends = like.sends if like.sends is None or rank == like.rank else not like.sends
        return self._by_number.get(rank, {}).get((like.group, sends, number))

    def waiting(self, rank: int) -> Call | None:
        """The call in which a rank waits; if several, the first that it waits for."""
        return next((call for call in self.calls.get(rank, ()) if call.waits), None)

    def absent(self, call: Call) -> list[int]:
        """Ranks of its group that have not made this call; those whose record begins later have."""
        return [r for r in call.group[1] if r != call.rank and not self._came(r, call)]

    def _came(self, rank: int, call: Call) -> bool:
        sends = call.sends if call.sends is None else not call.sends
        numbers = [n for group, s, n in self._by_number.get(rank, {}) if group == call.group and s == sends]
        counted = self.dumps.get(rank, {}).get("counts", {}).get(call.group[0], (0, 0))[call.sends is not None]
        return max([counted, *numbers]) >= call.number

    def after(self, call: Call) -> Call | None:
        """The next call of the same rank, in whatever group."""
        return next((c for c in self.calls[call.rank] if c.record > call.record and not c.beside), None)


def _ranks(text: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in str(text).strip("[]()").split(",") if word.strip())


def _calls(rank: int, dump: Dump, lines: int | None = None) -> Iterable[Call]:
    members = {name: _ranks(pg["ranks"]) for name, pg in dump["pg_config"].items()}
    offset = dump.get("clock_offset_ns", 0)
    ours = "position" in dump
    for entry in dump["entries"]:
        name, desc = entry["process_group"]
        kind = entry["profiling_name"].partition(":")[2].partition(" ")[0]
        message = entry["is_p2p"]
        sizes, dtypes = entry["input_sizes"] or entry["output_sizes"], entry["input_dtypes"] or entry["output_dtypes"]
        pending = entry["state"] != "completed"
        yield Call(
            rank=rank,
            record=entry["record_id"],
            group=(name, members.get(name, ())),
            number=entry["p2p_seq_id"] if message else entry["collective_seq_id"],
            op=kind if message else entry.get("op", kind),
            axis=entry.get("axis") or desc,
            shape=str(list(sizes[0])) if sizes else "",
            dtype=_SHORT.get(dtypes[0], dtypes[0].lower()) if dtypes else "",
            extra=entry.get("extra", ""),
            sends=kind == "send" if message else None,
            place=entry.get("place", "") or _place(entry.get("frames", ())),
            site="<".join((entry.get("site", "") or _place(entry.get("frames", ()))).split("<")[:lines]),
            created=entry["time_created_ns"] + offset,
            waits=entry["waiting"] if ours else pending,
            comparable=entry.get("comparable", kind not in _SHAPES_MAY_DIFFER),
        )


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside of `torch.distributed`, in a dump that has no `place`."""
    for frame in frames:
        if "torch/distributed" not in str(frame["filename"]):
            return f"{PurePath(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"
    return ""


def table(records: Records) -> list[tuple[str, ...]]:
    """A row for each rank, below a row of titles: what it waits in or did last, for how long, where it is."""
    rows: list[tuple[str, ...]] = [("rank", "calls", "waits in, or did last", "since", "line")]
    now = max((d["time_ns"] + d.get("clock_offset_ns", 0) for d in records.dumps.values() if "time_ns" in d), default=0)
    for rank in range(records.world):
        if rank not in records.dumps:
            rows.append((str(rank), "", "no record", "", ""))
            continue
        calls, waiting = records.calls[rank], records.waiting(rank)
        call = waiting or (calls[-1] if calls else None)
        since = f"{(now - call.created) / 1e9:.1f} s" if call is not None and now else ""
        done = "" if waiting is not None or call is None else " (done)"
        shown = f"{call.named} {call.tensor}{done}" if call is not None else "nothing"
        where = call.place if waiting is not None and call is not None else records.dumps[rank].get("position", "")
        number = records.dumps[rank]["entries"][-1]["record_id"] + 1 if calls else 0
        rows.append((str(rank), str(number), shown, since, where))
    return rows
