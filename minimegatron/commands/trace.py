"""Merge what the ranks of a profiled window have written into one trace for Perfetto, with one clock and with arrows.

    minimegatron train ... --profile --profile-ranks 0 1 2 3 [--use-pytorch-profiler] --profile-dir profile
    minimegatron trace profile -o merged.json.gz          # open it at https://ui.perfetto.dev

A process a rank; an arrow from the sender of a message to its receiver, and through the members of a collective. If
torch's profiler ran as well, its operators are beside them, the longest first up to `--max-slices`.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.errors import ConfigError, ranges
from minimegatron.flags import Parser

LARGEST_FILE = 1 << 30  # bytes
_TIMELINE = re.compile(r"rank(\d+)_steps([\d-]+)\.timeline\.json")


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; `argv` without the command's name."""
    from minimegatron.viz.merged_trace import LARGEST, merge, problems

    parser = Parser(prog="minimegatron trace", description="One trace of all ranks, for https://ui.perfetto.dev.")
    parser.add_argument("folder", help="what --profile-dir named")
    parser.add_argument("-o", "--output", help="file to write, .json or .json.gz; default FOLDER/merged.json.gz")
    parser.add_argument("--max-slices", type=int, default=LARGEST, metavar="N", help=f"default {LARGEST:,}")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    timelines, torchs = read(folder)
    trace = merge(timelines, torchs, args.max_slices)
    if wrong := problems(trace):
        raise ConfigError(
            f"the merged trace is not valid: {'; '.join(wrong[:3])}",
            where=str(folder),
            fix="files of one run only: remove the others",
        )
    output = Path(args.output or folder / "merged.json.gz")
    data = json.dumps(trace).encode()
    output.write_bytes(gzip.compress(data, 6) if output.suffix == ".gz" else data)
    kinds = [event["ph"] for event in trace["traceEvents"]]
    other = trace["otherData"]
    print(
        f"{output}: ranks {ranges(line['rank'] for line in timelines)}, {kinds.count('X'):,} slices, "
        f"{kinds.count('s'):,} arrows; left out: {other['slices_left_out']:,} slices, "
        f"{other['flows_left_out']:,} arrows without all ends"
    )
    return 0


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """The timelines of the last window of a folder, and torch's traces of the same by rank.

    Raises:
        ConfigError: there are none, or a file is none.
    """
    windows: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.timeline.json")):
        if found := _TIMELINE.fullmatch(path.name):
            windows.setdefault(found[2], []).append(path)
    if not windows:
        raise ConfigError(
            f"{folder} has no timelines of ranks",
            fix="train ... --profile --profile-ranks 0 1 --profile-dir FOLDER writes them",
        )
    paths = max(windows.values(), key=lambda paths: max(path.stat().st_mtime for path in paths))
    timelines = [_json(path, "timeline") for path in paths]
    torchs = {}
    for path, line in zip(paths, timelines, strict=True):
        beside = path.with_name(path.name.replace(".timeline.json", ".json"))
        if beside.exists():
            torchs[line["rank"]] = _json(beside, "traceEvents")
    return timelines, torchs


def _json(path: Path, field: str) -> dict[str, Any]:
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise ConfigError(f"{path} has {size:,} bytes", fix="a shorter window: --profile-step-end")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", fix="profile again: the run was cut off") from None
    if not isinstance(value, dict) or field not in value:
        raise ConfigError(f"{path} has no {field}", fix="name a folder that --profile-dir has filled")
    return value


if __name__ == "__main__":
    sys.exit(main())
