"""A learner's training: its file, its processes, and the log that it writes.

    run.toml --> Attempt: one command, until its end or a kill --> log --> Run: steps of one attempt

Any program will do that takes the words that are filled in and writes what `minimegatron train --log-file` writes: an
object a line, first the configuration (`"event": "config"`), then each step (`"event": "train"`) with its losses. One
that is started again appends to its log, and begins with its configuration again.

A **rank** is a process below the command whose environment has `RANK`, as torchrun gives it; without any it is the
command itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil

from labkit.acceptance import Missed, read_tables, require
from labkit.program import Program, filled, kill, left_of
from minimegatron.config.run import SECTION_OF, SECTIONS
from minimegatron.errors import ConfigError
from minimegatron.training.arguments import DEFAULTS

COMMANDS = ("train", "elsewhere", "export")
FACTS = ("parameters", "tokens_a_step", "tokens", "bytes_a_rank", "warmup_share")
# What the command is given, and what says where something is written or shown: nothing to explain.
GIVEN = {
    "data_path",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "seed",
    "save",
    "load",
    "log_file",
}
GIVEN |= {"tensorboard_dir", "data_cache_path", "vocab_size", "train_samples"}
STEP_SECONDS, LOG_SECONDS = 600.0, 0.02  # until the next step; between looks at the log
END_SECONDS, LEFT_SECONDS = 60.0, 15.0  # of a command after a kill; of processes after their command
EXACT = {"losses": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}  # to the last bit
TAIL = 1 << 16  # bytes of a log, in which its last step is


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `run.toml` says.

    Attributes:
        start: {`train`, `elsewhere`, `export`: command line}.
        facts: {name: number}, of `FACTS`.
        why: {field: why it has its value}.
    """

    start: Mapping[str, str]
    facts: Mapping[str, float]
    why: Mapping[str, str]


def read_plan(path: Path) -> Plan:
    """A `run.toml`.

    Raises:
        ConfigError: it is none, or something is missing in it.
    """
    tables = read_tables(path, "start", "facts", "why")
    start = tables["start"]
    for name in COMMANDS:
        if not isinstance(start.get(name), str) or not start[name].strip():
            raise ConfigError(f"[start] has no `{name}`", where=str(path), fix=f'{name} = "COMMAND"')
    words = {"train": ("data", "tokenizer", "seed", "save", "log"), "export": ("save", "model")}
    words["elsewhere"] = words["train"]
    for name, wanted in words.items():
        for word in wanted:
            if f"{{{word}}}" not in start[name]:
                what = f"`{name}` does not use {{{word}}}"
                raise ConfigError(what, where=str(path), fix=f"put {{{word}}} where the command says it")
    for name, value in tables["facts"].items():
        if name not in FACTS or type(value) not in (int, float):
            raise ConfigError(f"[facts] {name} is {value!r}", where=str(path), fix=f"a number for {', '.join(FACTS)}")
    return Plan(start, tables["facts"], {name: str(text) for name, text in tables["why"].items()})


@dataclasses.dataclass(frozen=True)
class Run:
    """What one attempt has logged.

    Attributes:
        config: its configuration: {section: {field: value}}, and `machine`.
        steps: {iteration: its record}, of those that are written whole.
    """

    config: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, Any]]

    @property
    def first(self) -> int:
        """The first step that it took."""
        return min(self.steps)

    @property
    def last(self) -> int:
        """The last one."""
        return max(self.steps)

    def loss(self, step: int) -> float:
        """The mean loss of the tokens of a step."""
        return float(self.steps[step]["losses"]["lm loss"])

    def field(self, name: str) -> Any:
        """A field of its configuration."""
        return self.config[SECTION_OF[name]][name]

    @property
    def layout(self) -> dict[str, int]:
        """Ranks on each axis."""
        sizes = {axis: self.field(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline", "expert")}
        sizes["context"] = self.field("context_parallel_size")
        others = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
        return {**sizes, "data": self.config["machine"]["world_size"] // others}

    def chosen(self) -> set[str]:
        """Fields that have another value than their default, and are not `GIVEN`; not those that follow from others."""
        found = set()
        for section, cls in SECTIONS.items():
            for field in dataclasses.fields(cls):
                value = self.config[section][field.name]
                value = tuple(value) if isinstance(value, list) else value
                defaults = (field.default, DEFAULTS.get(section, {}).get(field.name))
                if field.default is not None and value not in defaults:
                    found.add(field.name)
        return found - GIVEN - {"max_position_embeddings"}  # which a run makes as long as its samples


def read_log(path: Path) -> list[Run]:
    """The attempts of a log, each of which begins with its configuration; a line that is cut off is left out."""
    found: list[Run] = []
    steps: dict[int, Mapping[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "config":
            steps = {}
            found.append(Run(record, steps))
        elif record.get("event") == "train" and found:
            steps[int(record["iteration"])] = record
    return found


def check_log(run: Run) -> None:
    """Hold a log against what is read of it.

    Raises:
        Missed: something is missing in it.
    """
    for section, cls in SECTIONS.items():
        of = run.config.get(section)
        absent = [f.name for f in dataclasses.fields(cls) if not isinstance(of, dict) or f.name not in of]
        require(not absent, f"the configuration in the log has no {section}.{absent[0]}" if absent else "")
    machine = run.config.get("machine")
    ranks = machine.get("world_size") if isinstance(machine, dict) else None
    require(isinstance(ranks, int) and ranks > 0, f"the configuration in the log has machine.world_size {ranks!r}")
    for step, record in run.steps.items():
        losses, owners = record.get("losses"), record.get("memory_by_owner")
        seen = {
            "losses.lm loss": losses.get("lm loss") if isinstance(losses, dict) else None,
            "grad_norm": record.get("grad_norm"),
            "learning_rate": record.get("learning_rate"),
            "global_batch_size": record.get("global_batch_size"),
            "memory_by_owner": sum(owners.values()) if isinstance(owners, dict) else None,
        }
        wrong = [f"{name} {value!r}" for name, value in seen.items() if type(value) not in (int, float)]
        require(not wrong, f"step {step} in the log has {', '.join(wrong)}, where a number belongs")


def last_step(path: Path) -> int:
    """The last step that is written whole, whichever attempt took it; 0 for none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        for line in reversed(file.read().split(b"\n")[:-1]):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                if record["event"] == "config":
                    return 0
                if record["event"] == "train":
                    return int(record["iteration"])
    return 0


def named_in(command: str, folder: Path) -> set[str]:
    """The fields that a command line names: its flags, and the keys of its `--config`.

    Raises:
        ConfigError: that file cannot be read.
    """
    words = filled(command, {})
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    found = {flag[2:].removeprefix("no-").replace("-", "_") for flag in flags}
    for path in (folder / value for flag, value in itertools.pairwise(words) if flag == "--config"):
        try:
            found |= {name for section in json.loads(path.read_text()).values() for name in section}
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"--config {path.name}: {error}", fix="a JSON file with sections of fields") from None
    return (found & SECTION_OF.keys()) - GIVEN


@dataclasses.dataclass
class Attempt:
    """A training that is running.

    Attributes:
        program: its processes.
        log: what it writes.
        before: attempts that the log had already.
        file: its inode then: a run that does not go on begins a log of its own, and renames the one that is there.
    """

    program: Program
    log: Path
    before: int
    file: int = 0

    def runs(self) -> list[Run]:
        """The attempts that this one has logged: one, or none yet."""
        return read_log(self.log)[self.before if _inode(self.log) == self.file else 0 :]

    def run(self) -> Run:
        """What it has logged.

        Raises:
            Missed: nothing, or something else than a log.
        """
        runs = self.runs()
        if not runs or not runs[-1].steps:
            raise Missed(f"it has logged no step: {self.program.last_words()}")
        check_log(runs[-1])
        return runs[-1]

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, or the command itself."""
        return self.program.having("RANK") or self.program.processes()[:1]

    def until(self, step: int, seconds: float = STEP_SECONDS) -> bool:
        """Wait until a step is taken; False if the command has ended before.

        Raises:
            Missed: no step comes any more.
        """
        last, since = 0, time.monotonic()
        while self.program.alive:
            if (now := last_step(self.log)) != last:
                last, since = now, time.monotonic()
            if last >= step and self.runs():  # an earlier attempt may have been there before
                return True
            require(time.monotonic() - since < seconds, f"no step for {seconds:.0f} s after step {last}")
            time.sleep(LOG_SECONDS)
        return False

    def kill_a_rank(self, random: Random) -> str:
        """SIGKILL to one; what the command did then.

        Raises:
            Missed: it has not ended in time, ended as if all were well, or left processes behind.
        """
        ranks, below = self.ranks(), self.program.processes()
        victim = random.choice(ranks)
        kill([victim])
        began = time.monotonic()
        if not self.program.ends(END_SECONDS):
            raise Missed(f"{END_SECONDS:.0f} s after the SIGKILL of a rank the command has not ended")
        took = time.monotonic() - began
        require(self.program.status != 0, "a rank was killed, and the command's exit status is 0")
        left = left_of(below, LEFT_SECONDS)
        require(not left, f"{len(left)} processes are left {LEFT_SECONDS:.0f} s after the command has ended")
        return f"1 of {len(ranks)} ranks was killed; the command ended with {self.program.status} after {took:.1f} s"


def _inode(path: Path) -> int:
    return path.stat().st_ino if path.is_file() else 0


@contextlib.contextmanager
def attempt(command: str, folder: Path, words: Mapping[str, object], output: Path) -> Iterator[Attempt]:
    """A training that ends with the block."""
    log = Path(str(words["log"]))
    before, file = len(read_log(log)), _inode(log)
    program = Program(command, folder, words, output)
    try:
        yield Attempt(program, log, before, file)
    finally:
        program.end()


def completed(command: str, folder: Path, words: Mapping[str, object], output: Path, seconds: float) -> None:
    """Run a command to its end.

    Raises:
        Missed: it fails, or takes longer.
    """
    program = Program(command, folder, words, output)
    try:
        require(program.ends(seconds), f"`{command[:60]}` has not ended after {seconds:.0f} s")
        told = f"`{command[:60]}` ended with status {program.status}: {program.last_words()}"
        require(program.status == 0, told)
    finally:
        program.end()


def different(one: Run, other: Run, steps: Sequence[int], tolerance: float) -> str:
    """Where the losses of two attempts differ by more, "" where they do not; with 0 every bit counts."""
    for step in steps:
        if step not in one.steps or step not in other.steps:
            return f"step {step} is in one of the two logs only"
        for name, shown in EXACT.items() if tolerance == 0 else [("losses", "loss")]:
            a, b = one.steps[step].get(name), other.steps[step].get(name)
            same = a == b if tolerance == 0 else abs(one.loss(step) - other.loss(step)) <= tolerance
            if not same:
                return f"step {step} has the {shown} {_short(a)}, where it is {_short(b)}"
    return ""


def _short(value: Any) -> str:
    return f"{value['lm loss']!r}" if isinstance(value, Mapping) and "lm loss" in value else repr(value)
