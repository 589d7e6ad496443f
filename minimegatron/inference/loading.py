"""A published model, or a checkpoint of a run, as a model that generates on a mesh."""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.checkpoint.conversion import Model, fill
from minimegatron.checkpoint.packed import keep_packed
from minimegatron.comm.mesh import Mesh
from minimegatron.inference.refit import weights_of
from minimegatron.layers.logical import materialize
from minimegatron.layers.lora import packed_of
from minimegatron.models.chunks import build_chunks


def load(model_folder: Model, mesh: Mesh, params_dtype: str, packed: bool = True) -> Any:
    """This rank's part of a model, in eval mode, on the device of the mesh.

    Args:
        model_folder: see `checkpoint.conversion.open_model`.
        mesh: the layout.
        params_dtype: "fp32", "bf16" or "fp16", of all weights that are not packed.
        packed: keep int4 and int8 weights packed (`checkpoint/packed`); otherwise they are dequantised.

    Raises:
        CheckpointError: the weights are not those of the configuration.
    """
    with torch.device("meta"):
        model = build_chunks(model_folder.config.replace(params_dtype=params_dtype), mesh)
    if packed and model_folder.words is not None:
        keep_packed(model, model_folder.words)
    materialize(model, "cpu")
    for param in model.parameters():
        param.detach().zero_()  # the file has no rows for the vocabulary's padding
    fill(weights_of(model), model_folder, params_dtype)
    for weight in packed_of(model):
        weight.to(mesh.device)
    return model.eval().to(mesh.device)
