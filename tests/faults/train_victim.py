"""A training whose ranks kill themselves at some steps, each once: `train_victim.py FOLDER STEP,STEP... ARGS`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from minimegatron.commands.pretrain_gpt import pretrain
from minimegatron.launch.rank import run_rank
from minimegatron.training.observers import Step
from minimegatron.training.trainer import Trainer
from tests.mock_data import few_documents


def main() -> None:
    folder, steps, args = Path(sys.argv[1]), [int(s) for s in sys.argv[2].split(",") if s], sys.argv[3:]
    real = Trainer._step

    def step(trainer: Trainer, asks_to_stop: bool) -> Step:
        for number, at in enumerate(steps):
            mine = trainer.mesh.rank == number % trainer.mesh.world.size
            if mine and trainer.state.iteration == at and not (folder / f"died.{at}").exists():
                (folder / f"died.{at}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return real(trainer, asks_to_stop)

    Trainer._step = step  # type: ignore[method-assign]
    with few_documents():
        pretrain(args)


if __name__ == "__main__":
    run_rank(main)
