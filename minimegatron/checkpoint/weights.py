"""Weights of a folder for a model: the one way by which a command reads them.

The problem in a sentence: a reader that takes what it needs of each tensor takes a corner of a larger one, and the
model that comes of it runs.

So all tensors of a folder are first held against all that its configuration describes, by name and shape
(`checkpoint/conversion.checked`): `convert` does it before it writes, `generate` and `train` before they read a number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimegatron.checkpoint.conversion import Model, checked
from minimegatron.checkpoint.regions import Logical, logical_shape
from minimegatron.checkpoint.sources import Described
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.chunks import build_stage


def logical_tensors(config: TransformerConfig) -> dict[str, Described]:
    """Names, shapes and dtypes of a model's weights, without padding."""
    with torch.device("meta"):
        model = build_stage(config, Mesh.serial())
    return {name: Described(param.dtype, logical_shape(layout_of(param))) for name, param in logical_parameters(model)}


def fill(tensors: Mapping[str, Logical], found: Model, params_dtype: str) -> None:
    """Fill what a rank holds of a model with the weights of a folder.

    Args:
        tensors: of the model that the folder describes, by logical name, or some of them.
        found: the folder.
        params_dtype: that the weights are rounded to where the folder has a wider one.

    Raises:
        CheckpointError: the folder's tensors are not those that its configuration describes, or not numbers.
    """
    _, weights = checked(found, logical_tensors, params_dtype)
    with torch.no_grad():
        for name, tensor in tensors.items():
            there = weights.tensors.get(name)
            if there is None or there.shape != tuple(tensor.shape):  # a layer of `--spec` that is none of the family's
                what = f"{name} {tuple(tensor.shape)}: the folder has {there.shape if there else 'nothing for it'}"
                raise CheckpointError(what, fix="train the model that the folder describes, without --spec")
            for part in tensor.parts:
                part.data.copy_(weights.read(name, part.box))
