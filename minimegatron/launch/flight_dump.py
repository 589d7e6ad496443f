"""What a rank's flight recorder has noted, as plain data, and as the files that torch's analyser reads.

    FOLDER/_dump_3        rank 3: a pickle, for `torchfrtrace FOLDER`
    FOLDER/rank3.json     the same, for people, other programs and `minimegatron flight-recorder FOLDER`

The names and types of all fields are those of torch's own dumps, version 2.10 (`_dump_fr_trace`), so its analyser and
others that read them work. What is beside them is ours, and theirs pass over it:

| of the whole dump                            | of an entry                                                        |
|----------------------------------------------|--------------------------------------------------------------------|
| `rank`, `world_size`, `hostname`, `pid`      | `op`, `axis`, `extra`: as the package says it                      |
| `reason`: why it was written                 | `place`: the line of user code, or else the one that called `comm` |
| `time_ns`, `clock_offset_ns`: of its clock   | `site`: the lines that called `comm`, the innermost of the stack   |
| `position`: the line of the main thread now  | `waiting`: this rank waits for it; `failed`: it has raised         |
| `counts`: calls and messages of each group   |                                                                    |

In the pickle a ring shift is two messages, because torch's analyser knows no such collective. It
drops calls of a rank with smaller numbers than the first that another rank still has; ours counts by group.

Files are written beside their names and renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.comm.flight_recorder import COMM, Entry, FlightRecorder, Group, Place
from minimegatron.comm.last_calls import Page
from minimegatron.launch import procs

VERSION = "2.10"  # of torch's format, as of torch 2.13
PICKLE = "_dump_"
# torch's names of dtypes, and of what the package calls otherwise.
_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}  # fmt: skip
_OTHERS = {
    "ring_shift": "ring_shift",
    "a comparison": "all_reduce",
    "all_gather_object": "all_gather_v",  # of objects, whose sizes differ
    "gather_object": "gather",
    "scatter_object_list": "scatter",
    "broadcast_object_list": "broadcast",
}
SITES = 3  # lines by which two calls are told apart
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def dump(
    recorder: FlightRecorder,
    rank: int,
    world: int,
    reason: str,
    *,
    timeout_seconds: float = 0.0,
    clock_offset_ns: int = 0,
    last: int | None = None,
    frames: bool = True,
) -> dict[str, Any]:
    """The record of this rank as plain data; may be called from any thread.

    Args:
        recorder: the recorder.
        rank, world: of this rank.
        reason: why it is asked for.
        timeout_seconds: how long this rank waits for others.
        clock_offset_ns: what has to be added to this machine's clock (`launch/clocks`).
        last: how many entries, the newest; default all.
        frames: with the whole stack of each entry.
    """
    entries = list(recorder.entries)
    entries = entries if last is None else entries[len(entries) - min(last, len(entries)) :]
    shown = [_entry(entry, rank, timeout_seconds, frames) for entry in entries]
    groups = {group.name: group for group in list(recorder.groups.values())}
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {name: _config(name, group.desc, group.ranks) for name, group in groups.items()},
        "pg_status": {str(group.number): _status(group, entries) for group in groups.values()},
        "entries": shown,
        "counts": {group.name: (group.collectives, group.messages) for group in groups.values()},
        "rank": rank,
        "world_size": world,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "reason": reason,
        "time_ns": time.time_ns(),
        "clock_offset_ns": clock_offset_ns,
        "position": str(procs.users_frame([_frame(place) for place in _stack_of_main_thread()]) or ""),
    }


def calls_since(recorder: FlightRecorder, rank: int, begin: int) -> list[dict[str, Any]]:
    """The entries of calls that were issued at or after a time in nanoseconds."""
    return [_entry(entry, rank, 0.0, frames=False) for entry in list(recorder.entries) if entry.created >= begin]


def write(dumped: dict[str, Any], prefix: Path) -> None:
    """Write both files of a rank; an older dump of it is replaced.

    Args:
        dumped: its dump.
        prefix: `FOLDER/_dump_`; the rank is appended. The folder is made.
    """
    folder, rank = prefix.parent, dumped["rank"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (
        (f"{prefix.name}{rank}", pickle.dumps(for_torch(dumped), protocol=2)),
        (f"rank{rank}.json", json.dumps(dumped).encode()),
    ):
        partial = folder / f".partial-{os.getpid()}-{threading.get_ident()}"
        partial.write_bytes(data)
        partial.replace(folder / name)


def _entry(entry: Entry, rank: int, timeout_seconds: float, frames: bool) -> dict[str, Any]:
    """An entry as torch writes it, and what is ours."""
    places = entry.frames()
    outside = [_frame(place) for place in places if not place.filename.startswith(COMM)] or [_frame(p) for p in places]
    group, is_message = entry.group, entry.message is not None
    sent, received = (entry.received if is_message else entry.sent), entry.received
    sends = entry.sends if is_message else None
    return {
        "record_id": entry.record,
        "pg_id": group.number,
        "process_group": (group.name, group.desc),
        "thread_name": "python",
        "thread_id": "",
        "collective_seq_id": 0 if is_message else entry.seq,
        "p2p_seq_id": entry.seq if is_message else 0,
        "op_id": entry.op_id,
        "profiling_name": _profiling_name(group.backend, entry.op, group.ranks, rank, sends),
        "time_created_ns": entry.created,
        "input_sizes": [list(sent[0])] if sent else [],
        "input_dtypes": [_dtype(sent[1])] if sent else [],
        "output_sizes": [list(received[0])] if received else [],
        "output_dtypes": [_dtype(received[1])] if received else [],
        "state": entry.state,
        "time_discovered_started_ns": entry.started or None,
        "time_discovered_completed_ns": entry.completed or None,
        "retired": entry.state == "completed",
        "timeout_ms": round(1000 * timeout_seconds),
        "is_p2p": is_message,
        "op": entry.op,
        "axis": entry.axis.name,
        "ranks": list(group.ranks),
        "extra": entry.extra,
        "comparable": entry.comparable,
        "waiting": entry.blocks,
        "time_wait_ns": entry.waiting or None,
        "failed": entry.failed,
        "place": _lines(outside),
        "site": "<".join(f"{frame.file}:{frame.line}" for frame in outside[:SITES]),
        "frames": [_as_torch(place) for place in places] if frames else [],
    }


def of_page(page: Page, rank: int, world: int, reason: str) -> dict[str, Any]:
    """A dump of the last calls of a rank that cannot hand in its own, because it was killed, or is stopped.

    What it waited for is not known; its last call counts as not completed.
    """
    calls = page.calls()
    places = [procs.Frame(*call["place"]) for call in calls]
    entries = []
    for call, place in zip(calls, places, strict=True):
        name, desc, backend, ranks = call["group"]
        message, last = call["sends"] is not None, call is calls[-1]
        sizes, dtypes = ([call["shape"]], [_dtype(call["dtype"])]) if call["dtype"] else ([], [])
        entries.append({
            "record_id": call["record"], "pg_id": 0, "process_group": (name, desc),
            "collective_seq_id": 0 if message else call["number"], "p2p_seq_id": call["number"] if message else 0,
            "op_id": call["number"], "profiling_name": _profiling_name(backend, call["op"], ranks, rank, call["sends"]),
            "time_created_ns": call["created"], "input_sizes": sizes, "input_dtypes": dtypes, "output_sizes": sizes,
            "output_dtypes": dtypes, "state": "started" if last else "completed", "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 0, "is_p2p": message,
            "op": call["op"], "axis": call["axis"], "ranks": list(ranks), "extra": call["extra"], "comparable": True,
            "waiting": False, "failed": last, "place": _lines([place]), "site": f"{place.file}:{place.line}",
            "frames": [{"name": place.function, "filename": place.file, "line": place.line}],
        })  # fmt: skip
    groups = {call["group"][0]: call["group"] for call in calls}
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {name: _config(name, desc, ranks) for name, desc, _, ranks in groups.values()},
        "pg_status": {},
        "entries": entries,
        "rank": rank,
        "world_size": world,
        "reason": reason,
        "partial": True,
        "clock_offset_ns": 0,
        "position": f"{places[-1]} (its last call)" if places else "",
    }


def _profiling_name(backend: str, op: str, ranks: Sequence[int], rank: int, sends: bool | None) -> str:
    """torch's name of a call: `gloo:all_reduce`, `gloo:send 0->1` with places in the group."""
    if sends is not None:
        here = list(ranks).index(rank)
        return f"{backend}:{f'send {here}->{1 - here}' if sends else f'recv {here}<-{1 - here}'}"
    return f"{backend}:{op if op in _COLLECTIVES else _OTHERS.get(op, 'barrier')}"


def _lines(frames: list[procs.Frame]) -> str:
    """The innermost line of user code, else of all, and the line of user code that called it."""
    users = [frame for frame in frames if procs.is_users(frame.file)] or frames[:1]
    shown = [f"{Path(frame.file).name}:{frame.line} in {frame.function}" for frame in users[:2]]
    return ", called at ".join(shown)


def for_torch(dumped: dict[str, Any]) -> dict[str, Any]:
    """A dump with each ring shift as the two messages that it is: torch's analyser knows no such collective."""
    entries, edges, rank = list[dict[str, Any]](), dict[str, tuple[int, ...]](), dumped["rank"]
    for entry in dumped["entries"]:
        if entry["op"] != "ring_shift":
            entries.append(entry)
            continue
        ranks, backend = entry["ranks"], entry["profiling_name"].partition(":")[0]
        here = ranks.index(rank)
        for sender, receiver in ((rank, ranks[(here + 1) % len(ranks)]), (ranks[here - 1], rank)):
            name, low = f"{entry['axis']}:{sender}->{receiver}", min(sender, receiver)
            edges[name] = tuple(sorted((sender, receiver)))
            place, other = int(rank != low), int(rank == low)
            what = f"send {place}->{other}" if sender == rank else f"recv {place}<-{other}"
            entries.append(entry | {
                "process_group": (name, entry["axis"]), "collective_seq_id": 0, "is_p2p": True,
                "p2p_seq_id": entry["collective_seq_id"], "profiling_name": f"{backend}:{what}",
            })  # fmt: skip
    configs = {name: _config(name, name.partition(":")[0], edge) for name, edge in edges.items()}
    return dumped | {"entries": entries, "pg_config": dumped["pg_config"] | configs}


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _frame(place: Place) -> procs.Frame:
    return procs.Frame(place.filename, place.line, place.name)


def _as_torch(place: Place) -> dict[str, Any]:
    return {"name": place.name, "filename": place.filename, "line": place.line}


def _config(name: str, desc: str, ranks: tuple[int, ...]) -> dict[str, str]:
    return {"name": name, "desc": desc, "ranks": str(list(ranks))}


def _status(group: Group, entries: list[Entry]) -> dict[str, int]:
    """As torch has it: numbers of the last collectives; -1 where none is known to be so far."""
    of = [entry for entry in entries if entry.group is group and entry.message is None]
    return {
        "last_enqueued_collective": group.collectives,
        "last_started_collective": max((e.seq for e in of if e.state != "scheduled"), default=-1),
        "last_completed_collective": max((e.seq for e in of if e.state == "completed"), default=-1),
    }


def _stack_of_main_thread() -> list[Place]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = []
    while frame is not None:
        places.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places
