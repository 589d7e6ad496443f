"""The units of a model: what is run as a whole, and whose weights are therefore needed at one moment.

The problem in a sentence: weights that are gathered on use must be gathered in pieces that are neither the whole model
(then nothing is saved) nor single matrices (then nothing is hidden); a transformer layer is just right.

A unit is an element of a `ModuleList` (a layer), or a module that contains no list (the embedding, the last norm, the
output layer). A module that contains lists is cut further, and what parameters it has of its own are a unit. The stages
of a pipeline rank, elements of a list themselves, say that they are to be cut (`is_stage`).

torch's `fully_shard` is called with the same units. Megatron-LM: `fsdp_unit_modules` of
`megatron/core/distributed/fsdp/mcore_fsdp_adapter.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def units_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """(module, its parameters) of every unit, in the order of registration; a shared parameter comes with each."""
    if not any(isinstance(module, nn.ModuleList) for module in model.modules()):
        if params := list(model.parameters()):
            yield model, params
        return
    if own := list(model.parameters(recurse=False)):
        yield model, own
    for child in model.children():
        for part in child if isinstance(child, nn.ModuleList) else (child,):
            if part is child or getattr(part, "is_stage", False):
                yield from units_of(part)
            elif params := list(part.parameters()):
                yield part, params
