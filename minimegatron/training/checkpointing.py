"""When a run saves, and how a failed save is noticed.

    after a step     save_interval divides it, or the run ends            -> save
    --async-save     a thread of each rank copies, then writes            -> after each step: are all ranks done?
    at the start     --load                                               -> `training/loading`

A background save has a process group of its own, so that its messages do not mix with those of a step. After a step all
ranks ask together whether it has ended, so that all raise its error after the same step. One save is under way at a
time: the next save waits for it, and so does the end of the run.

Megatron-LM: `save_checkpoint` in `megatron/training/checkpointing.py`, `async_utils.py`.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from minimegatron import trace
from minimegatron.checkpoint import commit
from minimegatron.checkpoint.commit import RootLock
from minimegatron.checkpoint.companions import FOLDER
from minimegatron.checkpoint.save import AsyncSave, Staging, save
from minimegatron.comm.agree import on_all_ranks, on_rank_zero
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import CheckpointConfig
from minimegatron.errors import BadStep, CheckpointError, DeadlineError
from minimegatron.training import loading
from minimegatron.training.loading import Loaded
from minimegatron.training.observers import Observer, Step
from minimegatron.training.run_state import RunState


class Checkpoints(Observer):
    """The checkpoints of a run; all ranks call everything here together.

    Args:
        config: where, how often, what.
        state: the run that is saved, and into which a checkpoint is loaded.
        say: prints a line on rank 0.

    Raises:
        CheckpointError: another run saves into the folder.
    """

    def __init__(self, config: CheckpointConfig, state: RunState, say: Callable[[str], None] = print) -> None:
        self.config, self.state, self.say = config, state, say
        self.mesh = mesh = state.mesh
        self.root = Path(config.save) if config.save is not None else None
        self._last = -1  # the step that was saved last
        self.given = ""  # hash of what the run was given beside weights
        self._lock: RootLock | None = None
        self._flight: AsyncSave | None = None
        self._staging, self._copied = Staging(), threading.Event()
        if self.root is not None:
            self._lock, self.run_id = _open_root(self.root, mesh)
            self._axis = _own_group(mesh.world, mesh) if config.async_save else mesh.world

    def begin_run(self, keep_given: Callable[[Path], str] = lambda root: "") -> None:
        """Load `--load`, if it is given, and check that `--save` has no checkpoints of later steps.

        Args:
            keep_given: writes the tokenizer and other given files into the folder of checkpoints; returns a hash.

        Raises:
            CheckpointError: see `loading.load`; or the folder has checkpoints of steps that this run would reach. Its
                lock is released.
        """
        try:
            if self.config.load is not None:
                self.load()
            if (root := self.root) is not None:
                self._refuse_later(root, self.state.counters.iteration)
                self.given = on_rank_zero(lambda: keep_given(root), self.mesh.world)
        except BaseException:
            self.close()
            raise

    def _refuse_later(self, root: Path, here: int) -> None:
        steps = on_rank_zero(lambda: commit.published(root), self.mesh.world)
        later = [step for step in steps if step > here or (step == here and step != self._last)]
        if later:
            raise CheckpointError(
                f"the run begins at iteration {here}, and there are checkpoints of {', '.join(map(str, later[:8]))}",
                where=str(root),
                fix=f"--load {root} continues from the newest; or choose another folder, or remove them",
            )

    def after_step(self, step: Step) -> None:
        """Save if a save is due, and take the outcome of a save in the background."""
        if self.root is None:
            return
        number, interval = step.iteration, self.config.save_interval
        with trace.span("save", "save"):
            self.settle(wait=step.last)
            if number != self._last and (step.last or (interval and number % interval == 0)):
                self.save()
                self.settle(wait=step.last)

    def save(self) -> None:
        """Write a checkpoint, or begin to; weights may be updated after `before_update`."""
        self.settle(wait=True)
        assert self.root is not None
        root, step, config = self.root, self.state.counters.iteration, self.config
        self._last = step
        tensors = self.state.tensors(config.save_optim, config.save_rng)
        values = self.state.values() | {FOLDER: self.given}
        keep = commit.Keep(config.save_keep_last, config.save_retain_interval, config.save_keep_best)
        copied = threading.Event()
        if config.async_save:
            of_passes = self.state.changed_by_passes(tensors)
            tensors |= self._staging.copy({name: tensors[name] for name in of_passes})
            still = {name: tensor for name, tensor in tensors.items() if name not in of_passes}

        def write() -> None:
            try:
                written = tensors | self._staging.copy(still) if config.async_save else tensors
            finally:
                copied.set()
            save(root, step, self.run_id, written, values, self._axis, keep)

        self._copied = copied
        self._flight = AsyncSave(write, config.async_save, step)

    def before_update(self) -> None:
        """Wait until the thread of a save has copied the tensors that the optimizer is about to change.

        Raises:
            DeadlineError: it takes longer than a save may.
        """
        if self._flight is None:
            return
        with trace.span("save", "save"):
            copied = self._copied.wait(self._patience)
        if not copied:
            raise DeadlineError(f"the checkpoint of iteration {self._flight.step} is not copied", fix="see its thread")

    def settle(self, wait: bool) -> None:
        """Take the outcome of the save under way, once it has ended on all ranks.

        Raises:
            CheckpointError: it failed.
        """
        flight = self._flight
        if flight is None:
            return
        if wait:
            flight.join(self._patience)
        elif not _on_all(flight.ended, self.mesh):
            return
        self._flight = None
        on_all_ranks(flight.result, self.mesh.world)
        self.say(f"saved checkpoint of iteration {flight.step} to {self.root}")

    def load(self) -> bool:
        """Load what `config.load` names; returns whether there was something.

        Raises:
            CheckpointError, ConfigError: see `loading.load`.
        """
        loaded = loading.load(self.config, self.state, self.say)
        self._note(self.config, loaded)
        return loaded is not None

    def _note(self, config: CheckpointConfig, loaded: Loaded | None) -> None:
        """A checkpoint of this run's own folder, with which it goes on, need not be saved again."""
        if loaded is not None and loaded.goes_on and self.root is not None:
            if Path(str(config.load)).resolve() == self.root.resolve():
                self._last = self.state.counters.iteration

    def go_back(self, error: BadStep) -> int:
        """Load the newest checkpoint of `config.save`; returns its step.

        Raises:
            BadStep: there is none.
        """
        assert self.root is not None
        root = self.root
        self.settle(wait=True)
        steps = on_rank_zero(lambda: commit.published(root), self.mesh.world)
        if not steps:
            raise BadStep(error.what, where=error.where, fix=f"there is no checkpoint to go back to: {error.fix}")
        whole = self.config.replace(load=str(root), ckpt_step=None, load_optim=True, load_rng=True, finetune=False)
        loaded = loading.load_checkpoint(whole, self.state, root, steps[-1], self.say)
        self._note(whole, loaded)
        return loaded.step

    @property
    def _patience(self) -> float:
        """The deadline of a save: it has three messages, each of which has the deadline of the group."""
        return 3 * self.mesh.parallel.distributed_timeout_seconds + 60

    def close(self) -> None:
        """Wait for the save under way, and release the lock of the folder; a run that ends by an exception does not
        wait."""
        if self._flight is not None and sys.exc_info()[0] is None:
            self._flight.join(self._patience)
        if self._lock is not None:
            self._lock.close()


def _open_root(root: Path, mesh: Mesh) -> tuple[RootLock | None, str]:
    """The lock of the folder, on rank 0, and a name for the files that this run writes."""
    held: list[RootLock] = []

    def begin() -> str:
        run_id = secrets.token_hex(8)
        held.append(RootLock(root, run_id))
        return run_id

    run_id = on_rank_zero(begin, mesh.world)
    return (held[0] if held else None), run_id


def _own_group(world: Axis, mesh: Mesh) -> Axis:
    """An axis of the same ranks with a gloo group of its own, for the messages of a thread."""
    if world.size == 1:
        return world
    seconds = mesh.parallel.distributed_timeout_seconds
    group = dist.new_group(list(world.ranks), backend="gloo", timeout=timedelta(seconds=seconds))
    return dataclasses.replace(world, name="checkpoint", group=group)


def _on_all(ended: Callable[[], bool], mesh: Mesh) -> bool:
    """Whether it has ended on every rank."""
    flag = torch.tensor([0.0 if ended() else 1.0], device=mesh.device)
    return not all_reduce(flag, mesh.world, "max").item()
