"""Where a run begins: a checkpoint that it goes on from, a published model, or nothing.

| `--load`                               | loaded                                   | the run begins at               |
|----------------------------------------|------------------------------------------|---------------------------------|
| a folder of checkpoints                | weights, optimizer, streams, counters    | the step of the newest complete |
|                                        |                                          | checkpoint, or of `--ckpt-step` |
| the same with `--finetune`             | weights                                  | step 0                          |
| a folder of a published model          | weights                                  | step 0                          |

**Published models.** `minimegatron train --load Qwen2.5-0.5B --tokenizer-type HuggingFaceTokenizer ...`: `config.json`
describes the model, so no flags are needed; a flag that contradicts it is refused. No conversion is needed: each
rank reads its part of each logical tensor (`checkpoint/regions`) from the published files (`checkpoint/sources`).
Weights are rounded to the run's dtype if that is narrower than the files', and the log says so; main parameters
start from the rounded weights. Tokenizer, chat template and the ids that end a text are kept beside the run's
checkpoints for a later export (`checkpoint/companions`); a run from scratch keeps its tokenizer there.

Megatron-LM: `load_checkpoint` in `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from minimegatron.checkpoint import commit, companions
from minimegatron.checkpoint.conversion import fill, open_model
from minimegatron.checkpoint.hf_config import TOKENS, is_published
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.manifest import Manifest
from minimegatron.checkpoint.ours import SCALES
from minimegatron.checkpoint.regions import Logical
from minimegatron.comm.agree import on_all_ranks, on_rank_zero
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import CheckpointConfig
from minimegatron.config.same_model import differing
from minimegatron.data.tokenizer_training import made_files
from minimegatron.errors import CheckpointError, ConfigError, RankError
from minimegatron.training import run_state
from minimegatron.training.datasets import RunData
from minimegatron.training.run_state import RunState, added_tensors, model_tensors
from minimegatron.training.same_run import compare, same_place

Taken = TypeVar("Taken")


class Loaded(NamedTuple):
    """What a run begins with: a checkpoint's step, and whether the run goes on from it or takes the weights alone."""

    step: int
    goes_on: bool


def load(config: CheckpointConfig, state: RunState, say: Callable[[str], None]) -> Loaded | None:
    """Load what `config.load` names into the run; None if there is no checkpoint. All ranks call it together.

    Raises:
        CheckpointError: there is none and one is required; it is not whole; it is of another model or run.
        ConfigError: a published model with options that only a checkpoint has.
    """
    assert config.load is not None
    root = Path(config.load)
    if is_published(root):
        if config.ckpt_step is not None or (config.save and root.resolve() == Path(config.save).resolve()):
            raise ConfigError(
                f"--load {root} is a published model: it has no steps, and checkpoints go elsewhere",
                fix="drop --ckpt-step, and give --save a folder of its own",
            )
        base = state.run.model.lora_base
        if base is not None and root.resolve() != Path(base).resolve():
            raise ConfigError(
                f"--load {root} and --lora-base {base}: two models", fix="one folder for both, or a run as --load"
            )
        say(load_published(state, root))
        return Loaded(0, goes_on=False)
    loaded = _take(config, root, state.mesh, lambda step: load_checkpoint(config, state, root, step, say), say)
    if loaded is None:
        say(f"no checkpoint in {root}: the run begins at its beginning")
    return loaded


def load_checkpoint(
    config: CheckpointConfig, state: RunState, root: Path, step: int, say: Callable[[str], None]
) -> Loaded:
    """Load a checkpoint into the run, as far as `config` asks for it.

    Raises:
        CheckpointError: it is not whole, or of another model or run.
    """
    folder, mesh = commit.folder_of(root, step), state.mesh
    manifest = on_all_ranks(lambda: _manifest(root, step), mesh.world)
    same_layout = run_state.same_layout(manifest.state["layout"], mesh)
    fresh = _is_fresh(config, manifest.state)
    optim = config.load_optim and not fresh
    notes = compare(manifest.state, state.run, state.facts, weights_only=fresh, new_optimizer=not optim)
    if not fresh:
        moved = on_all_ranks(
            lambda: same_place(manifest.state, state.tokens_of, config.override_checkpoint_args), mesh.world
        )
        notes = "\n".join(filter(None, [notes, moved]))
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
            hashed = sorted(manifest.files)[mesh.rank :: mesh.world.size]
            on_rank_zero(lambda: commit.verify_names(folder, manifest), mesh.world)
        read_tensors(wanted, folder, manifest, mesh.world, hashed)

    state.load(
        manifest,
        read,
        optim=optim,
        rng=rng,
        goes_on=not fresh,
        use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.override_opt_param_scheduler,
    )
    if config.load_rng and not fresh and not same_layout:
        state.begin_streams()
        say("random streams begin anew, from the seed and the iteration: the layout is another one")
    what = "weights of the checkpoint" if fresh else "checkpoint"
    say("\n".join(filter(None, [notes, f"loaded {what} of iteration {step} from {root}"])))
    return Loaded(step, goes_on=not fresh)


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


def continues(config: CheckpointConfig, mesh: Mesh) -> dict[str, Any] | None:
    """The `state` of the checkpoint from which `--load` will go on; None if another run begins.

    Raises:
        CheckpointError: there is none and one is required, or its manifest is damaged.
    """
    if config.load is None or is_published(root := Path(config.load)):
        return None
    manifest = _take(config, root, mesh, lambda step: on_all_ranks(lambda: _manifest(root, step), mesh.world))
    return None if manifest is None or _is_fresh(config, manifest.state) else manifest.state


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
