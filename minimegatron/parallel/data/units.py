"""The units of a model: what runs as a whole, and whose weights are therefore needed at one moment.

The problem in a sentence: weights that come on use must come in portions that are neither the whole model (then nothing
is saved) nor single matrices (then nothing is hidden behind computation); a transformer layer is just right.

    stage          what is in no list: embedding, last norm, output layer
      layer 0      an element of a `ModuleList` or `ModuleDict` is a unit ...
      layer 1      ... with all that is in it

A stage is the model, or one of several of a pipeline rank, which are elements of a list themselves and say so
(`is_stage`). What is in no list may be used anywhere in the stage (a tied embedding is used at both of its ends). In a
V-shaped pipeline the first stage and the last share one on one rank: it belongs to the first, the last borrows it.

torch's `fully_shard` is called with the same units. Megatron-LM: `fsdp_unit_modules` of
`megatron/core/distributed/fsdp/mcore_fsdp_adapter.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are needed together.

    Attributes:
        module: runs with them.
        params: each once; a parameter that several units share belongs to the first.
        borrowed: what it shares with units before it.
        stage: number of its stage.
        in_list: it is an element of a list.
    """

    module: nn.Module
    params: tuple[nn.Parameter, ...]
    borrowed: tuple[nn.Parameter, ...] = ()
    stage: int = 0
    in_list: bool = False


def units_of(model: nn.Module) -> list[Unit]:
    """The units in the order of registration: of each stage what is in no list, then its layers."""
    seen: set[int] = set()
    units = []
    for number, stage in enumerate(_stages(model)):
        elements = list(_elements(stage))
        inside = {id(p) for element in elements for p in element.parameters()}
        outside = [p for p in stage.parameters() if id(p) not in inside]
        for module, params in [(stage, outside), *((element, list(element.parameters())) for element in elements)]:
            fresh = tuple(p for p in params if id(p) not in seen)
            borrowed = tuple(p for p in params if id(p) in seen)
            seen |= {id(p) for p in fresh}
            if params:
                units.append(Unit(module, fresh, borrowed, number, module is not stage))
    return units


def leaves_of(unit: Unit) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The parts of a unit that run one after the other, each with its parameters: a layer, or what is beside a list."""
    if not _elements_exist(unit.module):
        yield unit.module, [*unit.params, *unit.borrowed]
        return
    held = {id(p) for p in (*unit.params, *unit.borrowed)}
    if own := [p for p in unit.module.parameters(recurse=False) if id(p) in held]:
        yield unit.module, own
    for child in unit.module.children():
        if not isinstance(child, LISTS):
            yield from leaves_of(Unit(child, tuple(p for p in child.parameters() if id(p) in held)))


def _stages(model: nn.Module) -> list[nn.Module]:
    stages = [module for module in model.modules() if getattr(module, "is_stage", False)]
    return stages or [model]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists."""
    for child in module.children():
        if isinstance(child, LISTS):
            yield from (child.values() if isinstance(child, nn.ModuleDict) else child)
        else:
            yield from _elements(child)


def _elements_exist(module: nn.Module) -> bool:
    return any(isinstance(child, LISTS) for child in module.modules())
