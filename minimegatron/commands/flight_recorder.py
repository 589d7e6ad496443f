"""Read the flight records of all ranks, say which call was the first that went wrong, and show where each rank is.

    minimegatron flight-recorder FOLDER

    first mismatch: rank 3 waits in all_reduce #4 over dp (ranks 1, 3) of [100] float32 at h.py:21 in main: rank 1 ...

    rank  calls  waits in, or did last                            since   line
    0        12  all_gather #4 over world (ranks 0-3) ...         3.1 s   h.py:22 in main
    ...

FOLDER holds what ranks wrote to `--flight-recorder-dump-path` (`launch/flight_records` says when), or what torch's own
recorder wrote for NCCL: `TORCH_FR_DUMP_TEMP_FILE=FOLDER/_dump_`, `TORCH_FR_BUFFER_SIZE=2000`. Nothing in a file is
executed. `torchfrtrace FOLDER` is torch's own analyser, for the same files.

| exit status | when                                             |
|-------------|--------------------------------------------------|
| 0           | the records agree, and no rank waits             |
| 1           | a mismatch was found                             |
| 2           | no records are there, or a file is none          |
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.errors import CheckpointError, ConfigError, named
from minimegatron.flags import Parser

LARGEST = 1 << 30  # bytes of a file that is read
_OURS, _TORCHS = re.compile(r"rank(\d+)\.json"), re.compile(r"[\w.-]*?(\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; `argv` without the command's name."""
    parser = Parser(
        prog="minimegatron flight-recorder",
        description="Which rank did which call at which line, while the others waited in which.",
    )
    parser.add_argument("folder", help="what --flight-recorder-dump-path or TORCH_FR_DUMP_TEMP_FILE named")
    parser.add_argument("--json", action="store_true", help="print the finding and the table as one JSON object")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="also show the last N calls of each rank")
    args = parser.parse_args(argv)

    from minimegatron.launch.flight_calls import Records, table
    from minimegatron.launch.mismatch import first_mismatch

    records = Records(read(Path(args.folder)))
    finding, rows = first_mismatch(records), table(records)
    if args.json:
        titles, *others = rows
        shown = {"kind": finding.kind, "text": finding.text, "ranks": list(finding.ranks)}
        print(json.dumps(shown | {"table": [dict(zip(titles, row, strict=True)) for row in others]}))
        return int(bool(finding))
    print(f"first mismatch: {finding.text}" if finding else finding.text, end="\n\n")
    print("\n".join(aligned(rows)))
    for rank, calls in records.calls.items():
        for call in calls[len(calls) - args.last :] if args.last > 0 else ():
            print(f"rank {rank}: {call.named} {call.tensor}{call.at}{' (waits)' if call.waits else ''}")
    missing = [rank for rank in range(records.world) if rank not in records.dumps]
    if missing:
        print(
            f"\n{named(missing)} left no record: killed, stopped, or its folder is on another machine", file=sys.stderr
        )
    return int(bool(finding))


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """The dumps of a folder by rank: ours, else torch's.

    Raises:
        ConfigError: there is none, or a file is no dump.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}", fix="a folder of flight records") from None
    ours = {int(m[1]): path for path in files if (m := _OURS.fullmatch(path.name))}
    theirs = {int(m[1]): path for path in files if (m := _TORCHS.fullmatch(path.name))}
    if not (found := ours or theirs):
        raise ConfigError(
            f"{folder} holds no flight records",
            fix="ranks write them to --flight-recorder-dump-path FOLDER at a deadline, an error or SIGUSR2",
        )
    return {rank: _read(path) for rank, path in sorted(found.items())}


def _read(path: Path) -> dict[str, Any]:
    if (size := path.stat().st_size) > LARGEST:
        raise ConfigError(f"{path} has {size:,} bytes", fix="a smaller --flight-recorder-trace-buffer-size")
    data = path.read_bytes()
    try:
        if path.suffix == ".json":
            dump = json.loads(data)
        else:
            from minimegatron.checkpoint.pickled import read_pickle

            dump = read_pickle(data, str(path), known=lambda name: False)
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"{path} is no flight record: {error}", fix="remove it, or name another folder") from None
    if not isinstance(dump, dict) or not {"entries", "pg_config"} <= dump.keys():
        raise ConfigError(f"{path} is no flight record: it has no entries", fix="remove it, or name another folder")
    return dump


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
