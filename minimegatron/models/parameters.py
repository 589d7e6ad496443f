"""How many parameters a model has, counted on the model itself, built without memory."""

from __future__ import annotations

import functools
import math

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.chunks import build_stage


@functools.lru_cache(maxsize=64)
def count_parameters(config: TransformerConfig, active: bool = False) -> int:
    """Parameters of the logical model that a gradient moves, padding of the vocabulary not counted.

    Args:
        config: the model.
        active: of the experts count only the k that a token passes.
    """
    with torch.device("meta"):
        model = build_stage(config.replace(transformer_impl="local"), Mesh.serial())
    count = 0
    for _, param in logical_parameters(model):
        layout = layout_of(param)
        if param.requires_grad:
            size = math.prod((layout.rows or layout.shape[0], *layout.shape[1:]))
            of_a_token = active and layout.experts is not None
            count += size // layout.shape[0] * config.moe_router_topk if of_a_token else size
    return count
