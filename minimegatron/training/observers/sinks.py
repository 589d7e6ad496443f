"""Sinks: where the numbers of the log go beside the console.

| sink        | flag                | contents                                                             |
|-------------|---------------------|----------------------------------------------------------------------|
| JSON lines  | `--log-file`        | the whole configuration first, then an object a line, full precision |
| TensorBoard | `--tensorboard-dir` | Megatron's tags                                                      |
| W&B         | `--wandb-project`   | the same tags; the `wandb` package must be installed                 |
| trackio     | `--trackio-project` | the same tags, on this machine; `trackio show` draws them            |

`WANDB_MODE=offline` is W&B's own way to write to `--wandb-save-dir` alone. `minimegatron watch` draws the log file.

A log file holds one run: an existing file is renamed, unless the run goes on with `--load` in the same file.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError


class Sink(Protocol):
    """A destination of numbers beside the console."""

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A file with one JSON object a line. The first has the configuration, no secrets and no environment."""

    def __init__(self, path: str, config: dict[str, Any]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", encoding="utf-8")
        self.write({"event": "config", **config})

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None:
        self.write(record)

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """TensorBoard scalars under Megatron's tags."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # half a second of imports: only when asked for

        self.writer = SummaryWriter(folder)

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None:
        for tag, value in tags.items():
            self.writer.add_scalar(tag, value, iteration)

    def close(self) -> None:
        self.writer.close()


class Tracked:
    """A run of Weights & Biases, or of trackio, which has the same interface, under the same tags.

    Args:
        package: `wandb` or `trackio`; `check_run` has made sure that it is there.
        options: of its `init`.
    """

    def __init__(self, package: str, **options: Any) -> None:
        self.run = importlib.import_module(package).init(**options)

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None:
        if tags:
            self.run.log(tags, step=iteration)

    def close(self) -> None:
        self.run.finish()


def set_aside(path: Path) -> Path | None:
    """Rename an existing log file to run.jsonl.1 or the next free number; returns the new path, or None."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    free = next(name for name in names if not name.exists())
    path.rename(free)
    return free


def open_sinks(run: RunConfig, say: Callable[[str], None], machine: Mapping[str, Any] | None = None) -> list[Sink]:
    """Open every configured sink; called only on the rank that prints.

    Args:
        run: the configuration, with where to log.
        say: prints a line.
        machine: how many ranks of what, for the beginning of the log file.

    Raises:
        ConfigError: a file or folder that cannot be written.
    """
    training, sinks = run.training, list[Sink]()
    try:
        if training.log_file:
            if run.checkpoint.load is None and (kept := set_aside(Path(training.log_file))):
                say(f"the log of an earlier run, {training.log_file}, is now {kept}")
            sinks.append(JsonLines(training.log_file, {"machine": dict(machine or {}), **run.to_dict()}))
        if training.tensorboard_dir:
            sinks.append(TensorBoard(training.tensorboard_dir))
    except OSError as error:
        raise ConfigError(f"cannot write the log: {error}", fix="another --log-file or --tensorboard-dir") from error
    if training.wandb_project:
        wandb: dict[str, Any] = {"project": training.wandb_project, "name": training.wandb_exp_name}
        wandb |= {"entity": training.wandb_entity, "dir": training.wandb_save_dir}
        sinks.append(Tracked("wandb", **wandb, config=run.to_dict()))
    if training.trackio_project:
        trackio = {"project": training.trackio_project, "name": training.trackio_exp_name}
        sinks.append(Tracked("trackio", **trackio, config=run.to_dict()))
    return sinks
