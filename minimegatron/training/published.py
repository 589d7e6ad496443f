"""A run that begins with the weights of a published model: each rank reads its part of them from the folder.

    minimegatron train --load Qwen2.5-0.5B --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen2.5-0.5B ...

The folder says what the model is (`config.json`), so no flag has to; one that is given must say the same. What a rank
holds, in any layout, is boxes of logical tensors (`checkpoint/regions`), and a box is read from rows of the published
files (`checkpoint/sources`): nothing is converted first and no rank reads what it does not hold.

The run starts at step 0 with a new optimizer. Weights are rounded to the run's dtype where it is narrower than the
files', which is said; main parameters start from the rounded ones.

What lies beside the weights, tokenizer, template, the ids that end a text, is kept beside the run's checkpoints, so
that its model is published as it began (`checkpoint/companions`); a run from scratch keeps its tokenizer there.
"""

from __future__ import annotations

from pathlib import Path

from minimegatron.checkpoint import companions
from minimegatron.checkpoint.conversion import fill, open_model
from minimegatron.checkpoint.hf_config import TOKENS, is_published
from minimegatron.checkpoint.ours import SCALES
from minimegatron.comm.agree import on_all_ranks
from minimegatron.config.same_model import differing
from minimegatron.data.published_tokenizer import made_files
from minimegatron.errors import CheckpointError
from minimegatron.training.datasets import RunData
from minimegatron.training.run_state import RunState, model_tensors


def load_published(state: RunState, folder: Path) -> str:
    """Fill the model of a run; all ranks must call.

    Returns:
        What was loaded, in words.

    Raises:
        CheckpointError, ConfigError: on every rank: the folder is not whole, or holds another model.
    """
    world, config = state.mesh.world, state.run.model
    found = on_all_ranks(lambda: open_model(folder, "hf"), world)
    differs = differing(config, found.config)
    if differs:
        raise CheckpointError(
            "the published model is another one than the flags describe:\n  " + "\n  ".join(differs),
            where=str(folder),
            fix="drop the flags that say something else; config.json describes the model",
        )
    held = {name.removeprefix("model."): tensor for name, tensor in model_tensors(state.model).items()}
    held = {name: tensor for name, tensor in held.items() if not name.endswith(SCALES)}  # FP8's begin with the run
    on_all_ranks(lambda: fill(held, found, config.params_dtype), world)
    state.took_weights()
    theirs, here = found.config.params_dtype, config.params_dtype
    rounded = f", {theirs} in the files, {here} here" if theirs != here else ""
    return f"loaded the {found.family} model in {folder}{rounded}"


def keep_what_was_given(load: str | None, data: RunData, root: Path) -> str:
    """Write what the run was given beside weights into the folder of its checkpoints; returns the hash.

    Args:
        load: folder that the run begins with.
        data: whose tokenizer it uses.
        root: of its checkpoints.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    tokenizer = data.tokenizer
    there: companions.Files = {}
    if load is not None:
        folder = Path(load) if is_published(Path(load)) else Path(load) / companions.FOLDER
        there = companions.files_in(folder) if folder.is_dir() else {}
    files = made_files(tokenizer)
    if (own := data.tokenizer_model) is not None:
        files = companions.tokenizer_files_in(Path(own) if Path(own).is_dir() else Path(own).parent)
    ids = dict(zip(TOKENS, (tokenizer.bos, tokenizer.eod, tokenizer.pad), strict=True))
    said = {name: i for name, i in ids.items() if i is not None and i >= 0}  # NO_PAD is no token
    return companions.keep(root, companions.of_run(there, files, said))
