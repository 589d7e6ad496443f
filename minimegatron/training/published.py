"""A run that begins with the weights of a published model: each rank reads its part of them from the folder.

    minimegatron train --load Qwen2.5-0.5B --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen2.5-0.5B ...

The folder says what the model is (`config.json`), so no flag has to; one that is given must say the same. What a rank
holds, in any layout, is boxes of logical tensors (`checkpoint/regions`), and a box is read from rows of the published
files (`checkpoint/sources`): nothing is converted first and no rank reads what it does not hold.

The run starts at step 0 with a new optimizer. Weights are rounded to the run's dtype where it is narrower than the
files', which is said; main parameters start from the rounded ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minimegatron.checkpoint.folder import open_published
from minimegatron.checkpoint.hf_export import differing
from minimegatron.checkpoint.ours import SCALES
from minimegatron.comm.agree import on_all_ranks
from minimegatron.errors import CheckpointError
from minimegatron.training.saving import model_tensors

if TYPE_CHECKING:
    from minimegatron.training.trainer import Trainer


def load_published(trainer: Trainer, folder: Path) -> str:
    """Fill the model of a run; all ranks must call.

    Returns:
        What was loaded, in words.

    Raises:
        CheckpointError, ConfigError: on every rank: the folder is not whole, or holds another model.
    """
    world = trainer.mesh.world
    family, config, weights = on_all_ranks(lambda: open_published(folder), world)
    differs = differing(trainer.run.model, config)
    if differs:
        raise CheckpointError(
            "the published model is another one than the flags describe:\n  " + "\n  ".join(differs),
            where=str(folder),
            fix="drop the flags that say something else; config.json describes the model",
        )
    wanted = {name.removeprefix("model."): tensor for name, tensor in model_tensors(trainer.model).items()}

    def fill() -> None:
        for name, tensor in wanted.items():
            if name.endswith(SCALES):
                continue  # of FP8: they begin with the run
            if name not in weights.tensors or torch.Size(weights.tensors[name].shape) != tensor.shape:
                there = weights.tensors.get(name, "nothing")
                raise CheckpointError(
                    f"{name}: the run has {tuple(tensor.shape)}, the folder {there}", where=str(folder)
                )
            with torch.no_grad():
                for part in tensor.parts:
                    part.data.copy_(weights.read(name, part.box))

    on_all_ranks(fill, world)
    trainer.optimizer.reload_model_params()
    trainer.model.start_param_gather()
    theirs = weights.tensors["embedding.word_embeddings.weight"].dtype
    rounded = f", {str(theirs).removeprefix('torch.')} in the files, {trainer.run.model.params_dtype} here"
    return f"loaded the {family} model in {folder}{rounded if theirs != trainer.run.model.dtype else ''}"
