"""Weights that both ends of a model use: one tensor where they are together, equal copies where they are not.

A tied output layer uses the embedding's matrix, and predictions of several tokens (`models/mtp.py`) embed tokens once
more, positions included. In a pipeline the embedding is on the first stage and they are on the last:

    both stages on one rank (V-shaped)    they share the tensor
    on two ranks                          the last has a copy, drawn from the same name and hence equal; gradients of
                                          the two are summed (`parallel/data/finalize`), the copy is counted in no norm
                                          and saved in no checkpoint, and equal gradients keep it equal

Megatron-LM: `setup_embeddings_and_output_layer` in `models/common/language_module/language_module.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import nn

from minimegatron.layers.param import layout_of

Weights = dict[str, tuple[nn.Module, str]]  # logical name -> the module that has the parameter, and its name there


class End(Protocol):
    """The first or the last stage of a model."""

    pre_process: bool

    def tied_weights(self) -> Weights:
        """What is here of the weights that both ends use; the same names at both."""
        ...


def tie_embeddings(*ends: End) -> None:
    """Say that a stage has copies of the other end's weights; or make both ends of this rank share their tensors.

    Args:
        ends: one stage, when it is made; or the first and the last, both made.
    """
    if len(ends) == 1:
        for name, (module, attribute) in ends[0].tied_weights().items():
            copy = {} if ends[0].pre_process else {"shared": True, "tied_to": name}
            weight = getattr(module, attribute)
            weight.param_layout = dataclasses.replace(layout_of(weight), copies="embd", **copy)  # type: ignore[arg-type]
        return
    first, last = (end.tied_weights() for end in ends)
    for name, (module, attribute) in first.items():
        weight = getattr(module, attribute)
        weight.param_layout = dataclasses.replace(layout_of(weight), copies="")
        setattr(*last[name], weight)
