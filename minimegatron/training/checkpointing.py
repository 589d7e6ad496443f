"""When a run saves, what it loads, and how a failed save is noticed.

    after a step     save_interval divides it, or the run ends            -> save
    --async-save     a thread of each rank copies, then writes            -> after each step: are all ranks done?
    at the start     --load: the newest complete checkpoint, verified     -> weights, optimizer, streams, counters
                     --load: the folder of a published model              -> weights; the run begins at step 0

A background save has a process group of its own, so that its messages do not mix with those of a step. After a step all
ranks ask together whether it has ended, so that all raise its error after the same step. One save is under way at a
time: the next save waits for it, and so does the end of the run.

**Published models.** `minimegatron train --load Qwen2.5-0.5B --tokenizer-type HuggingFaceTokenizer ...`: `config.json`
describes the model, so no flags are needed; a flag that contradicts it is refused. No conversion is needed: each
rank reads its part of each logical tensor (`checkpoint/regions`) from the published files (`checkpoint/sources`).
Weights are rounded to the run's dtype if that is narrower than the files', and the log says so; main parameters
start from the rounded weights. Tokenizer, chat template and the ids that end a text are kept beside the run's
checkpoints for a later export (`checkpoint/companions`); a run from scratch keeps its tokenizer there.

Megatron-LM: `save_checkpoint`, `load_checkpoint` in `megatron/training/checkpointing.py`, `async_utils.py`.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from minimegatron.checkpoint import commit, companions
from minimegatron.checkpoint.commit import RootLock
from minimegatron.checkpoint.companions import FOLDER
from minimegatron.checkpoint.conversion import fill, open_model
from minimegatron.checkpoint.hf_config import TOKENS, is_published
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.manifest import Manifest
from minimegatron.checkpoint.ours import SCALES
from minimegatron.checkpoint.regions import Logical
from minimegatron.checkpoint.save import AsyncSave, Staging, save
from minimegatron.comm.agree import on_all_ranks, on_rank_zero
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import CheckpointConfig
from minimegatron.config.same_model import differing
from minimegatron.data.tokenizer_training import made_files
from minimegatron.errors import BadStep, CheckpointError, ConfigError, DeadlineError, RankError
from minimegatron.training import run_state
from minimegatron.training.datasets import RunData
from minimegatron.training.observers import Observer, Step
from minimegatron.training.run_state import RunState, added_tensors, model_tensors
from minimegatron.training.same_run import compare

Taken = TypeVar("Taken")


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
            CheckpointError: see `load`; or the folder has checkpoints of steps that this run would reach. Its lock is
                released.
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
        self.settle(wait=step.last)
        number, interval = step.iteration, self.config.save_interval
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
        if self._flight is not None and not self._copied.wait(self._patience):
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
        """Load the checkpoint of `config.load`; returns whether there was one.

        Raises:
            CheckpointError: there is none and one is required; it is not whole; it is of another model or run.
        """
        assert self.config.load is not None
        root = Path(self.config.load)
        if is_published(root):
            if self.config.ckpt_step is not None or root.resolve() == (self.root or Path()).resolve():
                raise ConfigError(
                    f"--load {root} is a published model: it has no steps, and checkpoints go elsewhere",
                    fix="drop --ckpt-step, and give --save a folder of its own",
                )
            self.say(load_published(self.state, root))
            return True
        taken = _take(self.config, root, self.mesh, lambda step: self._read(root, step, self.config), self.say)
        if taken is None:
            self.say(f"no checkpoint in {root}: the run begins at its beginning")
        return taken is not None

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
        self._read(root, steps[-1], whole)
        return steps[-1]

    def _read(self, root: Path, step: int, config: CheckpointConfig) -> int:
        """Load a checkpoint into the run, as far as `config` asks for it; returns its step."""
        folder, state = commit.folder_of(root, step), self.state
        manifest = on_all_ranks(lambda: _manifest(root, step), self.mesh.world)
        same_layout = run_state.same_layout(manifest.state["layout"], self.mesh)
        fresh = _is_fresh(config, manifest.state)
        optim = config.load_optim and not fresh
        notes = compare(manifest.state, state.run, state.facts, weights_only=fresh, new_optimizer=not optim)
        rng = config.load_rng and not fresh and same_layout
        for taken, prefix, flag in ((optim, "optimizer.", "--no-load-optim"), (rng, "rng.", "--no-load-rng")):
            if taken and not any(name.startswith(prefix) for name in manifest.tensors):
                raise CheckpointError(
                    f"it was saved without {prefix[:-1]} state", where=str(folder), fix=f"{flag} begins with a new one"
                )

        def read(wanted: dict[str, Logical]) -> None:
            hashed = list[str]()
            if config.verify_checkpoint:
                # of the same layout: what it wants
                hashed = sorted(manifest.files)[self.mesh.rank :: self.mesh.world.size]
                on_rank_zero(lambda: commit.verify_names(folder, manifest), self.mesh.world)
            read_tensors(wanted, folder, manifest, self.mesh.world, hashed)

        state.load(
            manifest,
            read,
            optim=optim,
            rng=rng,
            goes_on=not fresh,
            use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=config.override_opt_param_scheduler,
        )
        if not fresh and self.root is not None and Path(str(config.load)).resolve() == self.root.resolve():
            self._last = state.counters.iteration
        if config.load_rng and not fresh and not same_layout:
            state.begin_streams()
            self.say("random streams begin anew, from the seed and the iteration: the layout is another one")
        what = "weights of the checkpoint" if fresh else "checkpoint"
        self.say("\n".join(filter(None, [notes, f"loaded {what} of iteration {step} from {root}"])))
        return step

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


def load_published(state: RunState, folder: Path) -> str:
    """Load a published model; all ranks must call it.

    Returns:
        What was loaded, in words.

    Raises:
        CheckpointError, ConfigError: on every rank: the folder is not whole, or holds another model.
    """
    world, config = state.mesh.world, state.run.model
    published = on_all_ranks(lambda: open_model(folder, "hf"), world)
    differs = differing(config, published.config)
    if differs:
        raise CheckpointError(
            "the published model is another one than the flags describe:\n  " + "\n  ".join(differs),
            where=str(folder),
            fix="drop the flags that say something else; config.json describes the model",
        )
    added = added_tensors(state.model)
    named = {n.removeprefix("model."): t for n, t in model_tensors(state.model).items() if n not in added}
    tensors = {name: tensor for name, tensor in named.items() if not name.endswith(SCALES)}  # FP8's begin anew
    on_all_ranks(lambda: fill(tensors, published, config.params_dtype), world)
    state.took_weights()
    stored, dtype = published.config.params_dtype, config.params_dtype
    rounded = f", {stored} in the files, {dtype} here" if stored != dtype else ""
    return f"loaded the {published.family} model in {folder}{rounded}"


def keep_what_was_given(load: str | None, data: RunData, root: Path) -> str:
    """Write the tokenizer and other given files into the folder of the run's checkpoints; returns their hash.

    Args:
        load: folder that the run begins with.
        data: has the tokenizer.
        root: folder of its checkpoints.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    tokenizer = data.tokenizer
    given: companions.Files = {}
    if load is not None:
        folder = Path(load) if is_published(Path(load)) else Path(load) / companions.FOLDER
        given = companions.files_in(folder) if folder.is_dir() else {}
    files = made_files(tokenizer)
    if (own := data.tokenizer_model) is not None:
        files = companions.tokenizer_files_in(Path(own) if Path(own).is_dir() else Path(own).parent)
    ids = dict(zip(TOKENS, (tokenizer.bos, tokenizer.eod, tokenizer.pad), strict=True))
    token_ids = {name: i for name, i in ids.items() if i is not None and i >= 0}  # NO_PAD is no token
    return companions.keep(root, companions.of_run(given, files, token_ids))


def continues(config: CheckpointConfig, mesh: Mesh) -> dict[str, Any] | None:
    """The `state` of the checkpoint from which `--load` will go on; None if another run begins.

    Raises:
        CheckpointError: there is none and one is required, or its manifest is damaged.
    """
    if config.load is None or is_published(root := Path(config.load)):
        return None
    manifest = _take(config, root, mesh, lambda step: on_all_ranks(lambda: _manifest(root, step), mesh.world))
    return None if manifest is None or _is_fresh(config, manifest.state) else manifest.state


def _take(
    config: CheckpointConfig,
    root: Path,
    mesh: Mesh,
    take: Callable[[int], Taken],
    say: Callable[[str], None] = lambda text: None,
) -> Taken | None:
    """`take(step)` of the checkpoint that `config` asks for; of the next one, if that is removed meanwhile.

    Returns:
        What `take` has returned; None if there is no checkpoint.
    """
    steps = on_rank_zero(lambda: commit.published(root), mesh.world)
    while (step := _chosen(config, root, steps)) is not None:
        try:
            return take(step)
        except (CheckpointError, RankError):  # the second on ranks that were told the first
            steps = on_rank_zero(lambda: commit.published(root), mesh.world)
            if step in steps or not steps:
                raise
            say(f"another run has removed the checkpoint of iteration {step} while it was read")
    return None


def _is_fresh(config: CheckpointConfig, state: Mapping[str, Any]) -> bool:
    """Whether only the weights are loaded; a checkpoint that `convert` has written has nothing else."""
    return config.finetune or "counters" not in state


def _chosen(config: CheckpointConfig, root: Path, steps: list[int]) -> int | None:
    may_begin = config.ckpt_step is None and not config.exit_on_missing_checkpoint
    return None if may_begin and not steps else commit.choose(root, steps, config.ckpt_step)


def _manifest(root: Path, step: int) -> Manifest:
    try:
        return commit.read_manifest(root, step)
    except CheckpointError as error:
        older = [one for one in commit.complete(root) if one != step]
        fix = f"--ckpt-step {older[-1]} takes one whose manifest is whole" if older else error.fix
        raise CheckpointError(error.what, where=error.where, fix=fix) from None


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
