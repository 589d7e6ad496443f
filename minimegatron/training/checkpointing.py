"""When a run saves, what it continues from, and who notices that a save has failed.

    after a step     save_interval divides it, or the run ends            -> save
    --async-save     regions are copied, a thread of each rank writes     -> after each step: are all ranks done?
    at the start     --load: the newest complete checkpoint, verified     -> weights, optimizer, streams, counters

A background save has a process group of its own, so that its messages never stand between those of a step. Whether it
has ended is asked together, after a step, so that all ranks raise its error after the same one. One is in flight at a
time: the next save waits for it, and so does the end of the run.

Megatron-LM: `save_checkpoint`, `load_checkpoint` in `megatron/training/checkpointing.py`, `async_utils.py`.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from minimegatron.checkpoint import commit
from minimegatron.checkpoint.hf_config import is_published
from minimegatron.checkpoint.manifest import Manifest
from minimegatron.checkpoint.planning import read_tensors, write_tensors
from minimegatron.checkpoint.regions import Logical, Region
from minimegatron.checkpoint.storage import ShardReader, ShardWriter
from minimegatron.comm.agree import on_all_ranks, on_rank_zero
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.config.checkpoint import CheckpointConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.training import saving
from minimegatron.training.published import load_published
from minimegatron.training.state import TrainState

if TYPE_CHECKING:
    from minimegatron.training.trainer import Trainer


class Checkpoints:
    """The checkpoints of a run; all ranks call everything here together.

    Args:
        config: where, how often, what.
        mesh: of the run.
        say: prints a line on rank 0.

    Raises:
        CheckpointError: another run saves into the folder.
    """

    def __init__(self, config: CheckpointConfig, mesh: Mesh, say: Callable[[str], None]) -> None:
        self.config, self.mesh, self.say = config, mesh, say
        self.root = Path(config.save) if config.save is not None else None
        self._last = -1  # the step that was saved last
        self._lock: commit.RootLock | None = None
        self._flight: _Flight | None = None
        if self.root is not None:
            self._lock, self.run_id = _open_root(self.root, mesh)
            self._axis = _own_group(mesh.world, mesh) if config.async_save else mesh.world

    def after_step(self, trainer: Trainer, ends: bool) -> None:
        """Save if it is time to, and learn how a save in the background went."""
        if self.root is None:
            return
        self.settle(wait=ends)
        step, interval = trainer.state.iteration, self.config.save_interval
        if step != self._last and (ends or (interval and step % interval == 0)):
            self.save(trainer)
            self.settle(wait=ends)

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint, or begin to."""
        self.settle(wait=True)
        assert self.root is not None
        root, step = self.root, trainer.state.iteration
        self._last = step
        tensors = saving.tensors_of(trainer, self.config.save_optim, self.config.save_rng)
        state = saving.state_of(trainer)
        staged = on_rank_zero(lambda: commit.stage(root, step, self.run_id), self.mesh.world)
        writer = ShardWriter(staged, root, step, self.run_id, state)
        if self.config.async_save:
            tensors = {name: _copied(tensor) for name, tensor in tensors.items()}
        self._flight = _Flight(lambda: self._write(tensors, writer), self.config.async_save, step)

    def _write(self, tensors: dict[str, Logical], writer: ShardWriter) -> None:
        try:
            write_tensors(tensors, writer, self._axis)
        except CheckpointError:
            if self.mesh.rank == 0:
                commit.discard(writer.staged)
            raise
        if self.mesh.rank == 0:
            commit.retire(writer.root, self.config.save_keep_last)

    def settle(self, wait: bool) -> None:
        """Take the outcome of the save under way: of all ranks, once it has ended on all of them.

        Raises:
            CheckpointError: it failed.
        """
        flight = self._flight
        if flight is None:
            return
        if wait:
            flight.join()
        elif not _on_all(flight.ended, self.mesh):
            return
        self._flight = None
        on_all_ranks(flight.result, self.mesh.world)
        self.say(f"saved checkpoint of iteration {flight.step} to {self.root}")

    def load(self, trainer: Trainer) -> bool:
        """Continue from `config.load`; returns whether there was a checkpoint.

        Raises:
            CheckpointError: there is none and one is required; it is not whole; it is of another model.
        """
        assert self.config.load is not None
        root = Path(self.config.load)
        if is_published(root):
            if self.config.ckpt_step is not None or root.resolve() == (self.root or Path()).resolve():
                raise ConfigError(
                    f"--load {root} is a published model: it has no steps, and checkpoints go elsewhere",
                    fix="drop --ckpt-step, and give --save a folder of its own",
                )
            self.say(load_published(trainer, root))
            return True
        steps = on_rank_zero(lambda: commit.complete(root), self.mesh.world)
        step = self._chosen(root, steps)
        if step is None:
            self.say(f"no checkpoint in {root}: the run begins at its beginning")
            return False
        folder = commit.folder_of(root, step)
        manifest = on_all_ranks(lambda: Manifest.read(folder), self.mesh.world)
        saving.check_same_model(manifest.state["model"], trainer.run.model.to_dict())
        fresh = self.config.finetune or "counters" not in manifest.state  # as `convert` writes it: weights only
        config, same_layout = self.config, manifest.state["layout"] == saving.layout_facts(self.mesh)
        optim = config.load_optim and not fresh and _has(manifest, "optimizer.")
        rng = config.load_rng and not fresh and same_layout and _has(manifest, "rng.")
        wanted = saving.tensors_of(trainer, optim, rng)
        skipped = [p for p, there in (("optimizer.", optim), ("rng.", rng)) if not there]
        saving.check_same_tensors(wanted, manifest, skipped, self.mesh.world)
        if config.verify_checkpoint:
            mine = sorted(manifest.files)[self.mesh.rank :: self.mesh.world.size]
            on_all_ranks(lambda: commit.verify(folder, manifest, mine), self.mesh.world)
            on_rank_zero(lambda: commit.verify_names(folder, manifest), self.mesh.world)
        read_tensors(wanted, ShardReader(folder, manifest), self.mesh.world)
        self._take(trainer, manifest, wanted, optim, rng)
        what = "weights of the checkpoint" if fresh else "checkpoint"
        self.say(f"loaded {what} of iteration {step} from {root}")
        return True

    def _chosen(self, root: Path, steps: list[int]) -> int | None:
        asked = self.config.ckpt_step
        if asked is None and steps:
            return steps[-1]
        if asked in steps:
            return asked
        if asked is not None or self.config.exit_on_missing_checkpoint:
            what = "no complete checkpoint" if asked is None else f"no complete checkpoint of step {asked}"
            there = f"choose among {', '.join(map(str, steps))}" if steps else "look at what --load names"
            raise CheckpointError(what, where=str(root), fix=there)
        return None

    def _take(self, trainer: Trainer, manifest: Manifest, tensors: dict[str, Logical], optim: bool, rng: bool) -> None:
        """What has been read into memory becomes the run's."""
        config, state = self.config, manifest.state
        if optim:
            trainer.optimizer.filled_in_place(state["grad_scaler"])
        else:
            trainer.optimizer.reload_model_params()
            trainer.model.start_param_gather()
        if config.finetune or "counters" not in state:
            return
        trainer.state = TrainState(**state["counters"])
        trainer.scheduler.load_state_dict(
            state["scheduler"],
            use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=config.override_opt_param_scheduler,
        )
        self._last = trainer.state.iteration if config.load == config.save else -1
        if rng:
            streams: dict[str, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith("rng."):
                    _, stream, device = name.split(".")
                    streams.setdefault(stream, {})[device] = tensor.parts[0].data.view(-1)
            trainer.rng.load_state_dict(streams)
        elif config.load_rng:
            seed = trainer.run.training.seed + trainer.state.iteration
            trainer.rng.load_state_dict(RngStreams.on_mesh(seed, self.mesh).state_dict())
            self.say("random streams begin anew, from the seed and the iteration: the layout is another one")

    def close(self) -> None:
        """Wait for what is under way, and let go of the folder."""
        if self._flight is not None:
            self._flight.join()
        if self._lock is not None:
            self._lock.close()


class _Flight:
    """A save: done at once, or on a thread."""

    def __init__(self, write: Callable[[], None], background: bool, step: int) -> None:
        self.step = step
        self._error: BaseException | None = None
        self._write = write
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised by `result`, on the rank's own thread
            self._error = error

    def ended(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()  # the messages of a save have the deadline of their group

    def result(self) -> None:
        if self._error is not None:
            raise self._error


def _open_root(root: Path, mesh: Mesh) -> tuple[commit.RootLock | None, str]:
    """The lock, on rank 0, and a name for what this run writes."""
    held: list[commit.RootLock] = []

    def begin() -> str:
        held.append(commit.RootLock(root))
        return secrets.token_hex(8)

    run_id = on_rank_zero(begin, mesh.world)
    return (held[0] if held else None), run_id


def _own_group(world: Axis, mesh: Mesh) -> Axis:
    """The same ranks on gloo, for the messages of a thread."""
    if world.size == 1:
        return world
    seconds = mesh.parallel.distributed_timeout_seconds
    group = dist.new_group(list(world.ranks), backend="gloo", timeout=timedelta(seconds=seconds))
    return dataclasses.replace(world, name="checkpoint", group=group)


def _on_all(ended: Callable[[], bool], mesh: Mesh) -> bool:
    """Whether it has ended on every rank."""
    flag = torch.tensor([0.0 if ended() else 1.0], device=mesh.device)
    return not all_reduce(flag, mesh.world, "max").item()


def _copied(tensor: Logical) -> Logical:
    return Logical(
        tensor.shape, [Region(p.box, p.data.detach().to("cpu", copy=True)) for p in tensor.parts], tensor.dtype
    )


def _has(manifest: Manifest, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in manifest.tensors)
