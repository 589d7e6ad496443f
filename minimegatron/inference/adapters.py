"""Adapters of PEFT beside a model that generates: read, cut as its layers are, named by requests (`layers/loras`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minimegatron.checkpoint.conversion import Model, family_of
from minimegatron.checkpoint.peft import CONFIG, from_peft, read_adapter
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.linear import ParallelLinear
from minimegatron.layers.loras import Adapters, Loras
from minimegatron.layers.param import logical_name


def load_adapters(model: Any, model_folder: Model, folders: Mapping[str, Path]) -> Adapters:
    """Put the adapters of PEFT's folders beside the layers of this rank's part of a model.

    Args:
        model: of `inference/loading.load`; its weights may be packed.
        model_folder: the folder that it is of.
        folders: name -> folder with `adapter_config.json`.

    Raises:
        ConfigError: the model has adapters of its own, or its family none in PEFT's format.
        CheckpointError: a folder is no adapter, or one of another model.
    """
    config, mesh = model_folder.config, model.mesh
    if config.lora_rank is not None:
        raise ConfigError(
            "adapters that requests choose, beside a model that has one of its own",
            fix="minimegatron lora merge writes the model with its adapter in the weights; or lora export writes the "
            "adapter, and the base is loaded",
        )
    family = model_folder.family or family_of(config, model_folder.weights, model_folder.companions)
    adapters = Adapters(tuple(folders), mesh.tp, mesh.sequence_parallel)
    of_layer: dict[str, dict[int, tuple[int, float, torch.Tensor, torch.Tensor]]] = {}
    for k, (name, folder) in enumerate(folders.items(), 1):
        if not (folder / CONFIG).is_file():
            raise CheckpointError(
                f"the adapter {name} has no {CONFIG}",
                where=str(folder),
                fix="a folder of PEFT's; minimegatron lora export writes one from the checkpoints of a run",
            )
        adapter = read_adapter(folder)
        try:
            every = config.replace(lora_rank=adapter.rank, lora_alpha=adapter.alpha)
        except ConfigError as error:
            what = f"the adapter {name}, and the model has none: {error.what}"
            raise ConfigError(what, where=str(folder), fix="the model without adapters") from None
        try:
            found = from_peft(adapter, every, family)
        except CheckpointError as error:
            raise CheckpointError(f"the adapter {name}: {error.what}", where=str(folder), fix=error.fix) from None
        for key in [key for key in found if key.endswith(".lora_A")]:
            pair = found[key], found[key.removesuffix("A") + "B"]
            layer = of_layer.setdefault(key.removesuffix(".lora.lora_A"), {})
            layer[k] = (adapter.rank, adapter.alpha, *pair)
    for where, module in model.named_modules():
        if isinstance(module, ParallelLinear) and (given := of_layer.get(logical_name(where))):
            module.lora = Loras(module, adapters, given).to(mesh.device)
    return adapters


def memory(model: Any, adapters: Adapters) -> str:
    """The bytes of a rank's adapters, as a line for a log."""
    loras = [module for module in model.modules() if isinstance(module, Loras)]
    rank = max((each.rank for each in loras), default=0)
    nbytes = sum(buffer.nbytes for each in loras for buffer in each.buffers())
    return f"adapters: {len(adapters.names)} of rank {rank} or less beside {len(loras)} layers, {nbytes / 1e6:.1f} MB"
