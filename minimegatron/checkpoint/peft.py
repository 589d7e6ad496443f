"""Adapters in PEFT's format, both ways.

    adapter_config.json          rank, alpha, names of the layers
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...

Theirs are beside each published matrix, ours beside each of our packed ones (`layers/lora`): part k of our A is the A
of the k-th matrix that the row of the family's table names, and the rows of our B that belong to part k are its B.
Nothing is averaged or multiplied, so the way there and back is exact. A published adapter may leave out some matrices
that we pack together, e.g. adapt q and v; then the B of the others is 0.

PEFT: `peft/utils/save_and_load.py`, `peft/tuners/lora/config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from minimegatron.checkpoint.hf_config import read_json
from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.sources import InMemory, Source, Together, slices
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError, did_you_mean
from minimegatron.layers.lora import Lora, adapted, spread
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import build_stage
from minimegatron.models.families import FAMILIES

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Fields of theirs that change what an adapter computes, with the value that ours has.
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "target_parameters": None,
}


class Adapter(NamedTuple):
    """An adapter of a folder.

    Attributes:
        rank, alpha: of all its matrices.
        base: what it says that it is an adapter of; may be empty.
        tensors: under their names.
    """

    rank: int
    alpha: float
    base: str
    tensors: dict[str, torch.Tensor]


class Merged:
    """The weights of a source with its adapters added, without the adapters; a `Source`.

    Args:
        source: weights and adapters under our names.
        config: the model, with adapters.
    """

    def __init__(self, source: Source, config: TransformerConfig) -> None:
        self.source = source
        self.loras = {name: lora for name, lora in _adapted(config)}
        self.tensors = {name: kind for name, kind in source.tensors.items() if ".lora" not in name}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        weight = self.source.read(name, box)
        if name not in self.loras:
            return weight
        lora = self.loras[name]
        a, b = (self.source.read(f"{_prefix(name)}.lora_{x}").float() for x in "AB")
        experts = slice(*box[0]) if box is not None and a.dim() == 3 else slice(None)
        if a.dim() == 3:
            a, b = a[experts], b[experts]
        product = lora.scale * (spread(b, lora.part_of_row, lora.parts) @ a)
        if box is not None:
            place = slices(box)
            product = product[(slice(None), *place[1:])] if a.dim() == 3 else product[place]
        return (weight.float() + product).to(weight.dtype)


def _adapted(config: TransformerConfig) -> Iterator[tuple[str, Any]]:
    """(logical name of a weight, its adapter on the meta device) of a model."""
    with torch.device("meta"):
        model = build_stage(config, Mesh.serial(), None)
    name_of = {id(param): name for name, param in logical_parameters(model)}
    for weight, lora in adapted(model):
        yield name_of[id(weight)], lora


def _prefix(name: str) -> str:
    """`....linear_qkv.weight` -> `....linear_qkv.lora`, `....experts.weight1` -> `....experts.lora1`."""
    module, _, weight = name.rpartition(".")
    return f"{module}.{weight.replace('weight', 'lora')}"


class Place(NamedTuple):
    """One of our adapters, and theirs.

    Attributes:
        ours: the logical name of the layer, e.g. `decoder.layers.0.mlp.linear_fc1`.
        theirs: names of the modules that it packs, in the order of its parts.
        part_of_row: [o] the part of each row of our matrix.
    """

    ours: str
    theirs: tuple[str, ...]
    part_of_row: np.ndarray


def places(config: TransformerConfig, family: str) -> Iterator[Place]:
    """Every adapter of a model of this family.

    Raises:
        ConfigError: the model has none; or adapters that PEFT's format has no place for.
    """
    rows = {match.ours: match for match in FAMILIES[family].matches(config)}
    found = 0
    for name, lora in _adapted(config):
        match = rows.get(name)
        if match is None or match.how not in ("pack", "stack") or not isinstance(lora, Lora) or match.stacked:
            raise ConfigError(
                f"{name} of {family} has no adapter in PEFT's format",
                fix="--lora-target-modules without it; or merge the adapter, and convert the model",
            )
        found += 1
        modules = tuple(theirs.removesuffix(".weight") for theirs in match.theirs)
        yield Place(name.removesuffix(".weight"), modules, lora.part_of_row)
    if not found:
        raise ConfigError("the model has no adapter", fix="a run with --lora-rank")


def to_peft(tensors: Mapping[str, torch.Tensor], config: TransformerConfig, family: str) -> dict[str, torch.Tensor]:
    """Our logical tensors `....lora.lora_A`, `....lora.lora_B` under their names."""
    found: dict[str, torch.Tensor] = {}
    for place in places(config, family):
        a, b = (tensors[f"{place.ours}.lora.lora_{x}"] for x in "AB")
        for part, module in enumerate(place.theirs):
            rank = a.shape[0] // len(place.theirs)
            found[f"{PREFIX}{module}.lora_A.weight"] = a[part * rank : (part + 1) * rank].clone()
            found[f"{PREFIX}{module}.lora_B.weight"] = b[torch.from_numpy(place.part_of_row == part)].clone()
    return found


def from_peft(adapter: Adapter, config: TransformerConfig, family: str) -> dict[str, torch.Tensor]:
    """The inverse of `to_peft`, for a model whose `lora_rank` is the adapter's.

    Raises:
        CheckpointError: a tensor that belongs to no layer of the model; nothing is left out silently.
    """
    left, ours = dict(adapter.tensors), dict[str, torch.Tensor]()
    for place in places(config, family):
        example = next((left[n] for m in place.theirs if (n := f"{PREFIX}{m}.lora_A.weight") in left), None)
        if example is None:
            continue
        rank, inputs = example.shape
        a = torch.zeros(rank * len(place.theirs), inputs, dtype=example.dtype)
        b = torch.zeros(len(place.part_of_row), rank, dtype=example.dtype)
        for part, module in enumerate(place.theirs):
            if (name := f"{PREFIX}{module}.lora_A.weight") in left:
                a[part * rank : (part + 1) * rank] = left.pop(name)
                b[torch.from_numpy(place.part_of_row == part)] = left.pop(f"{PREFIX}{module}.lora_B.weight")
        ours |= {f"{place.ours}.lora.lora_A": a, f"{place.ours}.lora.lora_B": b}
    if left:
        known = [f"{PREFIX}{module}.lora_A.weight" for place in places(config, family) for module in place.theirs]
        raise CheckpointError(
            f"{len(left)} tensors of the adapter belong to no adapted layer of the model, for example {min(left)}",
            fix=did_you_mean(min(left), known) or "--lora-target-modules with these layers, and the adapter's base",
        )
    return ours


def beside(
    weights: Source, config: TransformerConfig, adapter: Adapter, family: str
) -> tuple[Source, TransformerConfig]:
    """A model's weights with an adapter, as one source, and the model with the layers that have one.

    Raises:
        CheckpointError: a tensor of the adapter belongs to no layer of the model.
    """
    every = config.replace(lora_rank=adapter.rank, lora_alpha=adapter.alpha)
    found = from_peft(adapter, every, family)
    layers = {name.split(".lora.")[0].rpartition(".")[2] for name in found}
    targets = tuple(name for name in every.lora_target_modules if name in layers)
    inside = {name.removeprefix("decoder."): tensor.to(config.dtype) for name, tensor in found.items()}
    both = Together({"": weights, "decoder.": InMemory(inside)})
    return both, every.replace(lora_target_modules=targets)


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: TransformerConfig, family: str, base: str = ""
) -> None:
    """Write a folder that `peft` loads.

    Args:
        folder: is made.
        tensors: our logical tensors of the adapters.
        config, family: the model.
        base: folder or name of the published model that it adapts.
    """
    theirs = to_peft(tensors, config, family)
    modules = sorted({name.removeprefix(PREFIX).split(".lora_")[0].rpartition(".")[2] for name in theirs})
    assert config.lora_rank is not None
    described = {
        **PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
    }
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in theirs.items()}, str(folder / WEIGHTS), {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> Adapter:
    """The adapter of a folder that `peft` wrote.

    Raises:
        CheckpointError: a file is missing; or the adapter computes otherwise than ours do, naming the field.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"no {name}", where=str(folder), fix="a folder that PEFT's save_pretrained wrote")
    described = read_json(folder / CONFIG, "a folder that PEFT's save_pretrained wrote")
    other = [
        f"{key} is {described[key]!r}"
        for key, value in PLAIN.items()
        if described.get(key, value) not in (value, None, [], {})
    ]
    if other:
        raise CheckpointError(
            f"the adapter computes otherwise than a LoRA of one rank: {', '.join(other)}", where=str(folder / CONFIG),
            fix="merge it with PEFT, and convert the model",
        )  # fmt: skip
    base = described.get("base_model_name_or_path") or ""
    return Adapter(described["r"], float(described["lora_alpha"]), base, load_file(str(folder / WEIGHTS)))
