"""`rehearse`: what tests call."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minimegatron.launch import procs
from tests.rehearsal import guard
from tests.rehearsal.record import ROOT, Record


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank left.

    Attributes:
        status: exit status, negative for a signal, None when the time was up.
        stdout, stderr: all of it.
        report: what it gave to `minimegatron.launch.rank.report`, or None.
        record: launches, host waits, messages and choices; empty without the device.
    """

    status: int | None
    stdout: str
    stderr: str
    report: Any
    record: Record


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """All ranks; the attributes besides `ranks` are those of rank 0."""

    ranks: list[Rank]

    @property
    def stdout(self) -> str:
        return self.ranks[0].stdout

    @property
    def report(self) -> Any:
        return self.ranks[0].report

    @property
    def record(self) -> Record:
        return self.ranks[0].record


class RehearsalFailed(AssertionError):
    """A rank ended with another status than 0, or the time was up; `result` has what there is."""

    def __init__(self, message: str, result: Rehearsal) -> None:
        super().__init__(message)
        self.result = result


def rehearse(
    script: str | Path,
    nproc: int = 1,
    gpus: int | None = None,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    kernels: bool = True,
    flash_attn: bool = False,
    check: bool = True,
) -> Rehearsal:
    """Run a script as the ranks of one machine with simulated GPUs, in processes of their own.

    Args:
        script: its text (whatever contains a line break), the path of a `.py` file, or the name of a module.
        nproc: ranks. More than one find each other as torchrun's ranks do (RANK, WORLD_SIZE, MASTER_ADDR ...); a single
            one has no launcher's environment.
        gpus: of this machine; default one a rank. 0: no device at all, plain CPU and gloo, for comparison.
        args: of the script.
        env: further environment variables.
        timeout: seconds for everything; a rehearsal that takes longer is ended, and fails.
        kernels: whether the project's kernels can be compiled; they run through the emulator.
        flash_attn: whether a stand-in for the package flash-attn is installed.
        check: raise when a rank fails.

    Raises:
        RehearsalFailed: a rank failed; the message ends with what the ranks wrote to stderr.
        pytest.skip: this machine has no compiler for the device.
    """
    import pytest  # not at the top: each simulated rank imports this package

    try:
        library = guard.library() if gpus != 0 else None
    except guard.NoGuard as reason:
        pytest.skip(str(reason))
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        command = [sys.executable, "-m", "tests.rehearsal.boot", f"--nproc={nproc}", f"--folder={folder}"]
        command += [f"--gpus={gpus}"] if gpus is not None else []
        command += [f"--guard={library}"] if library else []
        command += ["--no-kernels"] * (not kernels) + ["--flash-attn"] * flash_attn
        command += [_script(script, folder), *args]
        process = subprocess.Popen(
            command, env=_environment(folder, env), start_new_session=True, stderr=subprocess.PIPE, text=True
        )
        ended = ""
        try:
            _, boot = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            ended = f"it took longer than {timeout:g} s; "
        finally:
            if process.poll() is None:
                procs.send(process.pid, signal.SIGKILL, group=True)
                _, boot = process.communicate()
        result = Rehearsal([_read(Path(folder), rank) for rank in range(nproc)])
    if check and (ended or process.returncode):
        said = "\n".join(f"--- rank {i}: {r.status}\n{r.stderr[-4000:]}" for i, r in enumerate(result.ranks))
        raise RehearsalFailed(f"the rehearsal failed: {ended}status {process.returncode}\n{boot}{said}", result)
    return result


def _environment(folder: str, env: Mapping[str, str] | None) -> dict[str, str]:
    """This process's, without a launcher's and without what hides this machine's GPUs from tests."""
    others = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    kept = {k: v for k, v in os.environ.items() if k not in others}
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    mine = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MINIMEGATRON_RUN_DIR": folder}
    return {**kept, **mine, **(env or {})}


def _script(script: str | Path, folder: str) -> str:
    if isinstance(script, str) and "\n" in script:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(script))
        return str(path)
    return str(script)


def _read(folder: Path, rank: int) -> Rank:
    def text(name: str) -> str:
        path = folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    status, report, record = text(f"status.{rank}"), text(f"report.{rank}.json"), text(f"record.{rank}.json")
    return Rank(
        int(status) if status else None,
        text(f"out.{rank}"),
        text(f"err.{rank}"),
        json.loads(report) if report else None,
        Record.from_json(json.loads(record)) if record else Record(),
    )
