"""Where the numbers of a run go besides the console.

| sink        | flag                | what it gets                                                       |
|-------------|---------------------|--------------------------------------------------------------------|
| JSON lines  | `--log-file`        | the whole configuration first, then an object a line, full precision |
| TensorBoard | `--tensorboard-dir` | Megatron's tags                                                    |
| W&B         | `--wandb-project`   | the same tags; the `wandb` package must be installed               |

Each package is imported when it is asked for and not before. A log file has one run: one that is there already is kept
under another name, unless the run goes on with `--load` and in the same file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from minimegatron.config import TrainingConfig
from minimegatron.errors import ConfigError
from minimegatron.training.run import RunConfig


class Sink(Protocol):
    """Where numbers go besides the console."""

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line. The first one holds the configuration, no secrets and no environment."""

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


class WeightsAndBiases:
    """A run of Weights & Biases, under the same tags. `check_run` has made sure that the package is there."""

    def __init__(self, training: TrainingConfig, config: dict[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=training.wandb_project,
            name=training.wandb_exp_name,
            entity=training.wandb_entity,
            dir=training.wandb_save_dir,
            config=config,
        )

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None:
        self.run.log(tags, step=iteration)

    def close(self) -> None:
        self.run.finish()


def set_aside(path: Path) -> Path | None:
    """Give a log file that is there another name, run.jsonl.1 or the next that is free; which."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    free = next(name for name in names if not name.exists())
    path.rename(free)
    return free


def open_sinks(run: RunConfig, say: Callable[[str], None]) -> list[Sink]:
    """Every sink that is configured. Only the rank that speaks calls it.

    Args:
        run: what is trained, and where to log.
        say: prints a line.

    Raises:
        ConfigError: a file or folder that cannot be written.
    """
    training, sinks = run.training, list[Sink]()
    try:
        if training.log_file:
            if run.checkpoint.load is None and (kept := set_aside(Path(training.log_file))):
                say(f"the log of an earlier run, {training.log_file}, is now {kept}")
            sinks.append(JsonLines(training.log_file, run.to_dict()))
        if training.tensorboard_dir:
            sinks.append(TensorBoard(training.tensorboard_dir))
    except OSError as error:
        raise ConfigError(f"cannot write the log: {error}", fix="another --log-file or --tensorboard-dir") from error
    if training.wandb_project:
        sinks.append(WeightsAndBiases(training, run.to_dict()))
    return sinks
