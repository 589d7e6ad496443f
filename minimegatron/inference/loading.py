"""A published model, or a checkpoint of a run, as a model that generates on a mesh."""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.checkpoint.conversion import Model, fill
from minimegatron.comm.mesh import Mesh
from minimegatron.inference.packed import keep_packed, packed_of
from minimegatron.inference.refit import weights_of
from minimegatron.layers.logical import materialize
from minimegatron.models.chunks import build_chunks


def load(model_folder: Model, mesh: Mesh, params_dtype: str, packed: bool = True) -> Any:
    """This rank's part of a model, in evaluation mode on the device of the mesh.

    Args:
        model_folder: the folder.
        mesh: the layout.
        params_dtype: dtype of the weights that are numbers.
        packed: weights of 4 and 8 bits stay packed (`inference/packed`).

    Raises:
        CheckpointError: the weights are not those of the configuration.
    """
    with torch.device("meta"):
        model = build_chunks(model_folder.config.replace(params_dtype=params_dtype), mesh)
    if packed and model_folder.words is not None:
        keep_packed(model, model_folder.words)
    materialize(model, "cpu")
    for param in model.parameters():
        param.detach().zero_()  # padding of the vocabulary is in no file
    fill(weights_of(model), model_folder, params_dtype)
    for weight in packed_of(model):
        weight.to(mesh.device)
    return model.eval().to(mesh.device)
