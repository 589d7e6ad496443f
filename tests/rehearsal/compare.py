"""Run cases on the device and on plain CPUs, many in one job, and say what differs."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.api import rehearse
from tests.rehearsal.cases import Case
from tests.thorough import SLOW, THOROUGH

TOGETHER = 8  # cases of one job, where they are not of every run
SECONDS_A_CASE = 90.0  # on a crowded machine, every rank taken alone


def parameters(cases: Mapping[str, Case]) -> list[Any]:
    """Names for `parametrize`; those of cases that do not run each time are marked."""
    return [pytest.param(name, marks=SLOW if case.fast else THOROUGH) for name, case in cases.items()]


def together(cases: Mapping[str, Case], name: str) -> tuple[str, ...]:
    """The names of the cases that run in one job with this one."""
    mine = cases[name]
    alike = [n for n, c in cases.items() if (c.fast, c.nproc, c.flash_attn) == (mine.fast, mine.nproc, mine.flash_attn)]
    place = 0 if mine.fast else alike.index(name) // TOGETHER * TOGETHER
    return tuple(alike if mine.fast else alike[place : place + TOGETHER])


class Jobs:
    """The reports of jobs, each run once.

    Args:
        cases: all that there are.
    """

    def __init__(self, cases: Mapping[str, Case]) -> None:
        self._cases = cases
        self._job = functools.cache(self._run)

    def on_gpus(self, name: str) -> list[dict[str, Any]]:
        """What every rank reports of a case."""
        return [report.get(name, {"error": "not reached"}) for report in self._job(together(self._cases, name), None)]

    def on_cpus(self, name: str) -> list[dict[str, Any]]:
        """The same without a device; one rank has done it in the same process."""
        if self._cases[name].nproc == 1:
            return [self.on_gpus(name)[0]["cpu"]]
        return [report[name] for report in self._job(together(self._cases, name), 0)]

    def _run(self, names: tuple[str, ...], gpus: int | None) -> list[dict[str, Any]]:
        case = self._cases[names[0]]
        lines = {name: self._cases[name].line for name in names}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "cases.json")
            path.write_text(json.dumps(lines))
            limit = SECONDS_A_CASE * len(names) * case.nproc
            result = rehearse(
                "tests.rehearsal.training", case.nproc, gpus, args=[str(path)], timeout=limit,
                flash_attn=case.flash_attn, check=False,
            )  # fmt: skip
        for rank, one in enumerate(result.ranks):
            assert one.report is not None, f"rank {rank} left with {one.status}\n{one.stderr[-4000:]}"
        return [one.report for one in result.ranks]


def errors(found: list[dict[str, Any]]) -> list[str]:
    """What the ranks could not do, each with the lines that it came through."""
    return [
        f"rank {rank}: {one['error']}\n  at " + "\n  at ".join(one.get("at", []))
        for rank, one in enumerate(found)
        if "error" in one
    ]


def differences(gpu: dict[str, Any], cpu: dict[str, Any], tolerance: float) -> list[str]:
    """Losses and gradient norms of a run that are further apart than the tolerance (norms: ten times as much)."""
    found = [] if len(gpu["losses"]) == len(cpu["losses"]) > 0 else ["other numbers of steps"]
    for step, (mine, theirs) in enumerate(zip(gpu["losses"], cpu["losses"], strict=False), 1):
        if mine.keys() != theirs.keys():
            found.append(f"step {step}: losses {sorted(mine)} and {sorted(theirs)}")
        found += [
            f"step {step}: {name} {mine[name]:.6g} on the device, {theirs[name]:.6g} on the CPU"
            for name in mine.keys() & theirs.keys()
            if not abs(mine[name] - theirs[name]) <= tolerance * max(abs(theirs[name]), 1e-3)
        ]
    for step, (a, b) in enumerate(zip(gpu["norms"], cpu["norms"], strict=False), 1):
        if not abs(a - b) <= 10 * tolerance * b:
            found.append(f"step {step}: gradient norm {a:.6g} on the device, {b:.6g} on the CPU")
    return found
