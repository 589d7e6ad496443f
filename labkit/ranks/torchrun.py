"""Start ranks with `torchrun`, see every one of them end, and say in two lines what went wrong.

The problem in a sentence: a notebook cell that runs on four processes has four outputs and four ways to fail,
and when its kernel is restarted no process may stay behind.

    run = launch("cell.py", nproc=4, rundir=".runs/cell", timeout=60)
    print(render(run.stdout))                   # [ranks 0-3] hello
    if run.returncode: print(run.explain(source))

    FAILED on rank 1: ValueError: shape mismatch
      at line 6 of this cell: raise ValueError("shape mismatch")
      (ranks 0, 2-3 were ended with it: a consequence, not the cause)

It runs the real thing (`ranks/agent` is `torchrun` in a process of our own); `run.cmd` is the line that does the same
in a terminal. Ranks that see no GPU are forked from the agent, in place of executed (`ranks/early`). The script itself
needs nothing from here, but with `init()`, `finish()` and `report()` of `launch.rank` it starts, ends and talks
properly.

Ranks see no GPU unless the caller says so (`gpus=True`): what a lab or a test shows is then the same on a laptop and on
a node with eight GPUs, where `init` would take NCCL, and NCCL refuses the tensors that a script makes on the CPU.

| what can go on for ever                 | what ends it                                                              |
|-----------------------------------------|---------------------------------------------------------------------------|
| ranks that wait for each other          | `timeout` seconds after *all have checked in*; each says where it waits   |
| ranks that never start                  | `start_seconds` without progress                                          |
| this process killed, a kernel restarted | the kernel tells the agent (SIGHUP), the agent the ranks                  |
| the agent killed                        | the ranks carry `PR_SET_PDEATHSIG`; we kill whatever else bears our token |
| Ctrl-C here                             | SIGTERM to all, SIGKILL after 5 s or at the second Ctrl-C                 |
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.ranks import agent
from labkit.ranks.fork_server import Forked, dumped_frames, suits, trunk
from minimegatron.errors import ConfigError, named
from minimegatron.launch import procs
from minimegatron.launch.error_report import is_consequence
from minimegatron.launch.procs import RUN_DIR
from minimegatron.launch.startup_deadline import StartupDeadline, StartupProgress

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # a rank that gets SIGABRT writes its stack
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "NO_COLOR": "1",
    "TQDM_DISABLE": "1",
}
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.03


@dataclasses.dataclass
class Run:
    """The result of a launch. Lists are by rank.

    Attributes:
        cmd: the command line that does the same in a terminal.
        gpus: whether the ranks saw GPUs.
        backend: of their process group, "" if no rank called `init`.
        returncode: 0; the status of the rank that failed first (see `errors`), 5 if it has none of ours; 7: a hang.
        seconds: from start to end.
        stdout, stderr: everything a rank wrote.
        errors: how a rank ended that failed.
        reports: the value it gave to `report`.
        hung: it was ended because it took too long.
        agent_ended, agent_output: how `torchrun` itself ended, and its output.
    """

    cmd: str
    script: Path
    nproc: int
    timeout: float
    gpus: bool = False
    backend: str = ""
    returncode: int = 0
    seconds: float = 0.0
    stdout: list[str] = dataclasses.field(default_factory=list)
    stderr: list[str] = dataclasses.field(default_factory=list)
    errors: list[agent.RankEnd | None] = dataclasses.field(default_factory=list)
    reports: list[Any] = dataclasses.field(default_factory=list)
    hung: bool = False
    agent_ended: str = ""
    agent_output: str = ""

    def where(self) -> str:
        """Where the ranks ran: "4 ranks on CPUs (gloo)"."""
        device = "GPU" if self.gpus else "CPU"
        text = f"{self.nproc} ranks on {device}s" if self.nproc > 1 else f"1 rank on a {device}"
        return f"{text} ({'NCCL' if self.backend == 'nccl' else self.backend})" if self.backend else text

    def explain(self, source: str = "") -> str:
        """The failure in a few lines; "" if there was none.

        Args:
            source: the text of the cell that the script was written from; default: the contents of the script.
        """
        lines = (source or self.script.read_text()).splitlines()
        if self.hung:
            return self._explain_hang(lines)
        ends = [e for e in self.errors if e is not None]
        if not ends:
            return f"FAILED: torchrun {self.agent_ended}\n{self.agent_output[-3000:]}" if self.returncode else ""
        cause = agent.first([e for e in ends if not is_consequence(e.message)] or ends)
        same = [e.rank for e in ends if e.message and e.message == cause.message] or [cause.rank]
        others = [e.rank for e in ends if e.rank not in same]
        if cause.message:
            text = [f"FAILED on {named(same)}: {cause.message}"]
        else:
            text = [f"FAILED: rank {cause.rank} {procs.how_it_ended(cause.returncode)}"]
        if (line := self._last_line(cause.traceback)) and line <= len(lines):
            place = "this cell" if source else self.script.name
            text.append(f"  at line {line} of {place}: {lines[line - 1].strip()}")
        if others:
            were = "were" if len(others) > 1 else "was"
            text.append(f"  ({named(others)} {were} ended with it: a consequence, not the cause)")
        return "\n".join(text)

    def _explain_hang(self, lines: list[str]) -> str:
        text = [f"HANG: not finished {self.timeout:g} s after every rank had checked in. Where each rank was:"]
        for r in range(self.nproc):
            frames = dumped_frames(self.stderr[r])
            inside = next((f for f in frames if Path(f.file).name == self.script.name), None)
            if inside is not None and inside.line <= len(lines):
                place = f"line {inside.line}: {lines[inside.line - 1].strip()}"
            elif frames:
                place = str(frames[0])
            else:
                place = "had ended" if self.errors[r] is None else "did not answer (stopped, or stuck in the kernel)"
            text.append(f"  rank {r}: {place}")
        return "\n".join(text)

    def _last_line(self, trace: str) -> int | None:
        """The innermost line of the script in a traceback."""
        lines = re.findall(rf'File "[^"]*{re.escape(self.script.name)}", line (\d+)', trace)
        return int(lines[-1]) if lines else None


def launch(
    script: str | os.PathLike[str],
    nproc: int,
    rundir: str | os.PathLike[str],
    timeout: float = 120.0,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    gpus: bool = False,
    start_seconds: float = 180.0,
) -> Run:
    """`torchrun --standalone --nproc-per-node=NPROC SCRIPT ARGS`, supervised; prints nothing.

    Args:
        script: file that every rank runs.
        nproc: number of ranks.
        rundir: folder for logs and reports; those of an earlier run are removed.
        timeout: seconds the ranks may take once all of them have called `init`.
        args: of the script.
        env: added to the environment of the ranks.
        gpus: let the ranks see this machine's GPUs; `init` then takes NCCL where there is one for each rank.
        start_seconds: longest time until all have called `init`, counted from the last sign that they are starting
            (`launch/startup_deadline`); a script that never does has `timeout` from then on.

    Raises:
        ConfigError: no such script, or no ranks.
        KeyboardInterrupt: after everything has been ended.
    """
    path, folder = Path(script), Path(rundir)
    if not path.is_file():
        raise ConfigError(f"there is no script {str(path)!r}", fix="check the path")
    if nproc < 1:
        raise ConfigError(f"cannot start {nproc} ranks", fix="ask for at least 1")
    _clear(folder)
    run = Run(_in_a_terminal(path, nproc, args, gpus), path, nproc, timeout, gpus)
    token = f"{agent.TOKEN}={uuid.uuid4().hex}"
    environment = _environment(folder, token, {**(_settings_of_gpus() if gpus else NO_GPUS), **(env or {})})
    begun = time.monotonic()
    process = _start_agent([str(path), *args], nproc, folder, environment)
    try:
        _supervise(process, run, folder, start_seconds)
    except KeyboardInterrupt:
        process.terminate()
        _wait_or_kill(process)
        raise
    finally:
        agent.end_marked(token)
        _wait_or_kill(process)
    run.seconds = time.monotonic() - begun
    status = process.returncode
    assert status is not None, "it has been waited for"
    run.agent_ended = procs.how_it_ended(status)
    run.returncode = 7 if run.hung else status if status >= 0 else 5
    _read(run, folder)
    return run


def render(stdout: Sequence[str]) -> str:
    """One block per rank, in rank order, each line tagged; ranks that wrote the same share a block."""
    blocks: dict[str, list[int]] = {}
    for r, text in enumerate(stdout):
        blocks.setdefault(text.rstrip("\n"), []).append(r)
    return "\n".join(f"[{named(rs)}] {line}" for text, rs in blocks.items() for line in text.splitlines() if text)


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for pattern in ("started.*", "report.*.json", "agent.*"):
        for old in folder.glob(pattern):
            old.unlink()


def _in_a_terminal(path: Path, nproc: int, args: Sequence[str], gpus: bool) -> str:
    """The command line that does the same in a terminal."""
    hidden = [] if gpus else [f"{name}={value}" for name, value in NO_GPUS.items()]
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={nproc}", shlex.join([str(path), *args])]
    return " ".join([*hidden, *torchrun])


def _start_agent(
    script: Sequence[str], nproc: int, folder: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes] | Forked:
    """`torchrun` in a session of its own; what it and its ranks write goes to files below `folder`."""
    on_cpus = environment.get("CUDA_VISIBLE_DEVICES") == ""  # what has looked for GPUs cannot be forked
    command = [*([agent.FORK] if on_cpus else []), "--standalone", f"--nproc-per-node={nproc}"]
    command += ["--log-dir", str(folder / "logs"), "--redirects", "3", *script]
    with open(folder / "agent.log", "w") as log:
        if on_cpus and suits(environment):
            near, far = socket.socketpair()
            with near, far:
                environment[agent.LAUNCHER] = str(trunk().process.pid)
                return Forked(
                    trunk(), agent.__name__, far, str(folder), command,
                    environment=environment, log=log, cwd=os.getcwd(),
                )  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", agent.__name__, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _environment(folder: Path, token: str, extra: Mapping[str, str]) -> dict[str, str]:
    name, _, value = token.partition("=")
    package = str(Path(__file__).resolve().parents[2])
    paths = [os.getcwd(), package, extra.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ENVIRONMENT,
        **extra,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        RUN_DIR: str(folder.resolve()),
        agent.LAUNCHER: str(os.getpid()),
        name: value,
    }


def _settings_of_gpus() -> dict[str, str]:
    """Environment of ranks on GPUs, set before torch uses one; what the script will do is not known yet."""
    from minimegatron.launch.hardware import prepare_for_pipelines

    settings = dict(os.environ)
    prepare_for_pipelines(settings)
    return settings


def _supervise(process: subprocess.Popen[bytes] | Forked, run: Run, folder: Path, start_seconds: float) -> None:
    """Return when the agent has ended, or when the ranks have been ended because they hang."""
    deadline = StartupDeadline(start_seconds, StartupProgress(lambda: [process.pid]).made)
    checked_in: float | None = None
    while process.poll() is None:
        now = time.monotonic()
        if checked_in is None:
            complete = all((folder / f"started.{r}").exists() for r in range(run.nproc))
            checked_in = now if complete or deadline.is_over() else None
        elif now - checked_in > run.timeout:
            run.hung = True
            _dump_and_end(process.pid)
            _wait_or_kill(process)
            return
        time.sleep(POLL_SECONDS)


def _wait_or_kill(process: subprocess.Popen[bytes] | Forked) -> None:
    """Give the agent time to take note of what happened; on a machine that is too busy for that, end it."""
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        tree = procs.descendants(process.pid)
        process.kill()
        process.wait(GRACE_SECONDS)
        for pid in tree:
            procs.send(pid, signal.SIGKILL)


def _dump_and_end(agent_pid: int) -> None:
    """Make every rank write its stack (SIGABRT), then end those that could not, then let the agent write its report."""
    procs.send(agent_pid, signal.SIGSTOP)  # or it would end the others as soon as the first is gone
    ranks = procs.children(agent_pid)
    for pid in ranks:
        procs.send(pid, signal.SIGABRT)
    deadline = time.monotonic() + GRACE_SECONDS / 2
    while time.monotonic() < deadline and not all(procs.zombie_status(pid) is not None for pid in ranks):
        time.sleep(POLL_SECONDS)
    for pid in ranks:
        procs.send(pid, signal.SIGKILL)
    procs.send(agent_pid, signal.SIGCONT)


def _read(run: Run, folder: Path) -> None:
    """Read the files that the ranks left in the run directory."""
    attempts = sorted((folder / "logs").glob("*/attempt_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    ends = {}
    if (folder / "agent.json").exists():
        ends = {e["rank"]: agent.RankEnd(**e) for e in json.loads((folder / "agent.json").read_text())}
    run.agent_output = (folder / "agent.log").read_text(errors="replace")
    run.backend = next(filter(None, (_text(note) for note in folder.glob("started.*"))), "")
    for r in range(run.nproc):
        out, err = (_text(attempts[-1] / str(r) / f"{s}.log" if attempts else None) for s in ("stdout", "stderr"))
        run.stdout.append(out)
        run.stderr.append(err)
        end = ends.get(r)
        if end is not None and not end.message and end.returncode > 0:  # a script without `init`: what Python printed
            end.traceback = err
            end.message = re.sub(r"^\[rank\d+\]: ?", "", err.strip().rpartition("\n")[2])
        run.errors.append(end)
        written = folder / f"report.{r}.json"
        run.reports.append(json.loads(written.read_text()) if written.exists() else None)


def _text(path: Path | None) -> str:
    return path.read_text(errors="replace") if path is not None and path.exists() else ""
