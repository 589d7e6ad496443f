"""One trace of all ranks for Perfetto: a process for each rank, one clock, arrows between the two ends of a message.

    rank 0   passes         | forward ......... | backward ............ | optimizer_step |
             communication        [all_reduce #4 over tp [wait]]
    rank 1   communication          [all_reduce #4 over tp      ]

What each rank has written (`timeline`) is put on the clock of rank 0 by the offset that was measured at the start
(`launch/clocks`). A flow joins the members of a collective in the order in which they came, and the sender of a message
with its receiver; one that has an end outside of the window is left out, and counted.

Slices of one track must nest, so communications that overlap get a track each. A trace has at most `largest` slices:
those of torch's profiler are left out first, the shortest before the others; what was left out is counted in
`otherData`, and nothing is cut in silence.

The format is Chrome's: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event
Format), which https://ui.perfetto.dev opens, compressed or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VERSION = 1
PASSES, COMMUNICATION, TORCH = 1, 100, 1000  # first track of each kind
LARGEST = 400_000  # slices
# Of torch's profiler; Python frames are too many, and its flows would clash with ours.
_KEPT = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "gpu_user_annotation", "cuda_runtime")

Slice = dict[str, Any]


def timeline(
    rank: int, host: str, events: Iterable[Any], calls: Sequence[Mapping[str, Any]], to_wall: int, offset: int
) -> dict[str, Any]:
    """What a rank writes about its window, as plain data.

    Args:
        rank, host: of the rank.
        events: of `minimegatron.trace`, in seconds of the monotonic clock.
        calls: entries of a flight record.
        to_wall: nanoseconds of the wall clock minus those of the monotonic one.
        offset: nanoseconds to add to this machine's wall clock.
    """
    spans = [
        {"name": e.name, "kind": e.kind, "start": round(1e9 * e.start) + to_wall, "end": round(1e9 * e.end) + to_wall,
         "note": e.note}
        for e in events
        if e.kind not in ("comm", "wait", "memory", "mark")
    ]  # fmt: skip
    kept = ("process_group", "ranks", "collective_seq_id", "p2p_seq_id", "is_p2p", "op", "axis", "profiling_name",
            "time_created_ns", "time_wait_ns", "time_discovered_completed_ns", "input_sizes", "output_sizes",
            "input_dtypes", "place")  # fmt: skip
    return {
        "timeline": VERSION,
        "rank": rank,
        "hostname": host,
        "clock_offset_ns": offset,
        "spans": spans,
        "calls": [{name: call[name] for name in kept} for call in calls],
    }


def merge(
    timelines: Sequence[Mapping[str, Any]],
    torch_traces: Mapping[int, Mapping[str, Any]] | None = None,
    largest: int = LARGEST,
) -> dict[str, Any]:
    """One trace of all ranks.

    Args:
        timelines: one for each rank.
        torch_traces: rank -> the Chrome trace that torch's profiler has written there.
        largest: how many slices it may have.

    Returns:
        The trace, as JSON is written: `traceEvents`, `displayTimeUnit`, and `otherData` with what was left out.
    """
    events, slices, ends = list[Slice](), list[Slice](), dict[Any, list[Slice]]()
    for line in sorted(timelines, key=lambda line: line["rank"]):
        rank, offset = line["rank"], line["clock_offset_ns"]
        events += _names(rank, line["hostname"])
        spans = [
            _slice(rank, s["name"], s["kind"], s["start"], s["end"], offset, {"note": s["note"]}) for s in line["spans"]
        ]
        slices += _laid_out(spans, PASSES)
        pairs = [(call, own) for call in line["calls"] if (own := _call(rank, call, offset)) is not None]
        for call, own in pairs:
            ends.setdefault(_key(call), []).append(own[0])
        slices += _laid_out([own[0] for _, own in pairs], COMMUNICATION, nested=False)
        slices += [wait | {"tid": own[0]["tid"]} for _, own in pairs for wait in own[1:]]
    ops = [one for rank, trace in (torch_traces or {}).items() for one in _of_torch(rank, trace, timelines)]
    room = max(0, largest - len(slices))
    ops = sorted(ops, key=lambda one: -one["dur"])
    slices, dropped = slices + ops[:room], len(ops) - min(room, len(ops))
    too_many = max(0, len(slices) - largest)
    if too_many:  # not even our own fit: the last of the window are left out
        slices.sort(key=lambda one: one["ts"])
        slices, dropped = slices[:largest], dropped + too_many
    kept = {id(one) for one in slices}
    flows, open_ends = _flows(ends, kept)
    begin = min((one["ts"] for one in slices), default=0)
    for one in itertools.chain(slices, flows):
        one["ts"] = (one["ts"] - begin) / 1000
        if "dur" in one:
            one["dur"] = one["dur"] / 1000
    events += sorted(slices, key=lambda one: (one["pid"], one["tid"], one["ts"], -one["dur"])) + flows
    other = {"slices_left_out": dropped, "flows_left_out": open_ends, "clock": "of rank 0", "begin_ns": begin}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def problems(trace: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace; [] for a valid one.

    Every slice has a track, a time and a duration; slices of one track nest; every flow has one begin and one end, in
    this order, each inside of a slice.
    """
    found, tracks, flows = list[str](), dict[Any, list[Slice]](), dict[Any, list[Slice]]()
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            if event["dur"] < 0 or event["ts"] < 0:
                found.append(f"{event['name']} begins at {event['ts']} and takes {event['dur']}")
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["ph"] in "stf":
            flows.setdefault((event["cat"], event["id"]), []).append(event)
        elif event["ph"] != "M":
            found.append(f"an event of the kind {event['ph']!r}")
    for track, slices in tracks.items():
        stack = list[Slice]()
        for one in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= one["ts"] + 1e-6:
                stack.pop()
            if stack and one["ts"] + one["dur"] > stack[-1]["ts"] + stack[-1]["dur"] + 1e-3:
                found.append(f"track {track}: {one['name']} ends after {stack[-1]['name']}, in which it begins")
            stack.append(one)
    for key, points in flows.items():
        kinds = [one["ph"] for one in sorted(points, key=lambda one: one["ts"])]
        if kinds[0] != "s" or kinds[-1] != "f" or set(kinds[1:-1]) - {"t"} or len(kinds) < 2:
            found.append(f"flow {key} has {' '.join(kinds)}")
        for one in points:
            around = tracks.get((one["pid"], one["tid"]), ())
            if not any(s["ts"] - 1e-3 <= one["ts"] <= s["ts"] + s["dur"] + 1e-3 for s in around):
                found.append(f"flow {key} has an end outside of all slices")
    return found


def _slice(rank: int, name: str, kind: str, start: int, end: int, offset: int, args: Mapping[str, Any]) -> Slice:
    args = {key: value for key, value in args.items() if value}
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "ts": start + offset,
        "dur": max(0, end - start),
        "args": args,
    }


def _call(rank: int, call: Mapping[str, Any], offset: int) -> list[Slice] | None:
    """The slice of a communication, and inside of it that of the wait; None for one that has not ended."""
    begin, end = call["time_created_ns"], call["time_discovered_completed_ns"]
    if not end:
        return None
    number = call["p2p_seq_id"] if call["is_p2p"] else call["collective_seq_id"]
    sizes = call["input_sizes"] or call["output_sizes"]
    args = {
        "axis": call["axis"], "ranks": str(call["ranks"]), "group": call["process_group"][0], "number": number,
        "shape": str(sizes[0]) if sizes else "", "dtype": "".join(call["input_dtypes"]), "line": call["place"],
    }  # fmt: skip
    name = call["op"] if call["is_p2p"] else f"{call['op']} #{number} over {call['axis']}"
    found = [_slice(rank, name, "comm", begin, end, offset, args)]
    if wait := call["time_wait_ns"]:
        found.append(_slice(rank, "wait", "wait", max(wait, begin), end, offset, {}))
    return found


def _key(call: Mapping[str, Any]) -> Any:
    """What the ends of one communication have in common."""
    number = call["p2p_seq_id"] if call["is_p2p"] else call["collective_seq_id"]
    return (call["is_p2p"], call["process_group"][0], tuple(call["ranks"]), number)


def _flows(ends: Mapping[Any, Sequence[Slice]], kept: set[int]) -> tuple[list[Slice], int]:
    """Flow events of every communication all of whose ends are there, and how many were left out."""
    flows, left_out = list[Slice](), 0
    for number, ((message, _, ranks, _), slices) in enumerate(ends.items(), start=1):
        if {one["pid"] for one in slices} != set(ranks) or not all(id(one) in kept for one in slices):
            left_out += 1
            continue
        if message:  # from the beginning of the send to the end of the receive
            order = sorted(slices, key=lambda one: not one["name"].startswith("deliver"))
            times = [order[0]["ts"], max(order[0]["ts"], order[1]["ts"] + order[1]["dur"])]
            if times[1] > order[1]["ts"] + order[1]["dur"]:  # clocks differ by more than the message took
                left_out += 1
                continue
        else:
            order = sorted(slices, key=lambda one: one["ts"])
            times = [one["ts"] for one in order]
        for place, (one, ts) in enumerate(zip(order, times, strict=True)):
            kind = "s" if place == 0 else "f" if place == len(order) - 1 else "t"
            flow = {"ph": kind, "id": number, "name": "message" if message else "collective", "cat": "comm",
                    "pid": one["pid"], "tid": one["tid"], "ts": ts}  # fmt: skip
            flows.append(flow | ({"bp": "e"} if kind == "f" else {}))
    return flows, left_out


def _laid_out(slices: list[Slice], first: int, nested: bool = True) -> list[Slice]:
    """Give each slice a track, so that those of one track nest, or follow each other."""
    tracks = list[list[int]]()  # of each track the ends of the slices that are open
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        end = one["ts"] + one["dur"]
        track = len(tracks)
        for number, stack in enumerate(tracks):
            while stack and stack[-1] <= one["ts"]:
                stack.pop()
            if not stack or (nested and end <= stack[-1]):
                track = number
                break
        if track == len(tracks):
            tracks.append([])
        tracks[track].append(end)
        one["tid"] = first + track
    return slices


def _of_torch(rank: int, trace: Mapping[str, Any], timelines: Sequence[Mapping[str, Any]]) -> list[Slice]:
    """Slices of torch's profiler, in nanoseconds of rank 0's clock, on tracks of their own."""
    base = trace.get("baseTimeNanoseconds", 0)
    offset = next((line["clock_offset_ns"] for line in timelines if line["rank"] == rank), 0)
    threads = dict[Any, list[Slice]]()
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _KEPT:
            start = base + round(1000 * event["ts"])
            one = _slice(rank, event["name"], event["cat"], start, start + round(1000 * event["dur"]), offset, {})
            threads.setdefault((event["pid"], event["tid"]), []).append(one)
    first = TORCH
    for slices in threads.values():  # what is asynchronous ends after what began it
        first = 1 + max(one["tid"] for one in _laid_out(slices, first))
    return list(itertools.chain(*threads.values()))


def _names(rank: int, host: str) -> list[Slice]:
    """Titles of a rank's process and tracks."""

    def title(kind: str, tid: int = 0, /, **args: Any) -> Slice:
        return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "ts": 0, "args": args}

    return [
        title("process_name", name=f"rank {rank} on {host}"),
        title("process_sort_index", sort_index=rank),
        title("thread_name", PASSES, name="passes"),
        title("thread_name", COMMUNICATION, name="communication"),
    ]
