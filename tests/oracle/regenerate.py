"""Write the frozen numbers of `tests/golden/`, or check that Megatron still gives them.

python -m tests.oracle.regenerate                          # all: about two minutes on two cores
python -m tests.oracle.regenerate --only groups,schedule   # some
python -m tests.oracle.regenerate --check                  # compare, write nothing; exit status 1 on a difference
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from typing import Any

from tests import golden
from tests.oracle import megatron_cpu

SUBJECTS = ("groups", "schedule", "scaler", "microbatches", "slots", "gpt", "moe", "mtp", "zero")


def regenerate(subject: str) -> dict[str, Any]:
    """What Megatron says now, in the form in which it is frozen."""
    megatron_cpu.quiet()
    made_by = {name: importlib.metadata.version(name) for name in ("megatron-core", "torch", "numpy")}
    made_by["command"] = f"python -m tests.oracle.regenerate --only {subject}"
    content = {"made_by": made_by, **importlib.import_module(f"tests.oracle.{subject}").make()}
    return json.loads(json.dumps(content))  # so that it compares equal to what was read from a file


def differences(frozen: Any, now: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, as readable lines; `made_by` does not count."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        keys = [k for k in {**frozen, **now} if path or k != "made_by"]
        return [line for k in keys for line in differences(frozen.get(k), now.get(k), f"{path}/{k}")]
    if isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        return [
            line for i, (a, b) in enumerate(zip(frozen, now, strict=True)) for line in differences(a, b, f"{path}/{i}")
        ]
    return [] if frozen == now else [f"{path}: frozen {str(frozen)[:60]}, now {str(now)[:60]}"]


def to_text(value: Any, indent: str = "") -> str:
    """JSON with a line per entry, but short dicts and lists of numbers on one line, so that diffs can be read."""
    flat = json.dumps(value)
    deeper = indent + " "
    if isinstance(value, dict) and len(flat) > 100:
        return (
            "{\n"
            + ",\n".join(f"{deeper}{json.dumps(k)}: {to_text(v, deeper)}" for k, v in value.items())
            + f"\n{indent}}}"
        )
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(deeper + to_text(v, deeper) for v in value) + f"\n{indent}]"
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"comma-separated among {', '.join(SUBJECTS)}")
    parser.add_argument("--check", action="store_true", help="compare with the frozen numbers instead of writing them")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    unknown = set(wanted) - set(SUBJECTS)
    if unknown:
        parser.error(f"no subject {', '.join(sorted(unknown))}; choose among {', '.join(SUBJECTS)}")
    wrong = 0
    for subject in wanted:
        now = regenerate(subject)
        if arguments.check:
            lines = differences(golden.load(subject), now)
            wrong += len(lines)
            print(
                f"{subject}: " + ("as frozen" if not lines else "\n  ".join([f"{len(lines)} differences", *lines[:20]]))
            )
        else:
            path = golden.HERE / f"megatron_{subject}.json"
            path.write_text(to_text(now) + "\n")
            print(f"{subject}: wrote {path.name}, {path.stat().st_size} bytes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
