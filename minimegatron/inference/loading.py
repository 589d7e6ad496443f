"""A published model, or a checkpoint of a run, as a model that generates on a mesh."""

from __future__ import annotations

from typing import Any

from minimegatron.checkpoint.conversion import Model, fill
from minimegatron.comm.mesh import Mesh
from minimegatron.inference.refit import weights_of
from minimegatron.models.chunks import build_chunks


def load(model_folder: Model, mesh: Mesh, params_dtype: str) -> Any:
    """This rank's part of a model, in evaluation mode on the device of the mesh.

    Raises:
        CheckpointError: the weights are not those of the configuration.
    """
    model = build_chunks(model_folder.config.replace(params_dtype=params_dtype), mesh)
    for param in model.parameters():
        param.detach().zero_()  # padding of the vocabulary is in no file
    fill(weights_of(model), model_folder, params_dtype)
    return model.eval().to(mesh.device)
