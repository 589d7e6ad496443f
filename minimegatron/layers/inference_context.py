"""The state of generation: what a layer keeps of earlier tokens, and where it finds it.

One layer keeps two vectors for every token, another one latent, a third one matrix for the whole sequence. A layer says
what it keeps (`inference_state`), and writes and reads it itself, through its `LayerState`; the owner of the memory
need not know the layers:

| kept for each | e.g.                                    | says                               | writes and reads |
|---------------|-----------------------------------------|------------------------------------|------------------|
| token         | key and value of attention, a latent    | `StateSpec((g, d))`                | `..._tokens`     |
| sequence      | a recurrent state, a convolution's tail | `StateSpec((a, d, d), "sequence")` | `..._sequences`  |

A token's row is a number (`slots`), whatever the memory looks like: a static cache has a row for each place of each
sequence; with pages the rows belong to whichever sequence has the page. A forward pass has one `InferenceContext`, made
by the memory's owner (`inference/static_cache.py`); everything in it is on the device.

**Padding.** Prompts of different lengths are aligned at the left. Attention needs no more than that, because no token
sees later ones. What is kept for a sequence must stop at its own last token: `lengths` says which tokens are its own.

Megatron-LM: `megatron/core/inference/contexts/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from minimegatron.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A tensor that a layer keeps.

    Attributes:
        shape: for one token, or for one sequence.
        per: which of the two.
        dtype: default that of the model's weights.
    """

    shape: tuple[int, ...]
    per: Literal["token", "sequence"] = "token"
    dtype: torch.dtype | None = None


def inference_state_of(module: Any, what: str) -> dict[str, StateSpec]:
    """What a module keeps, which it says itself: a subclass that computes something else may keep something else.

    Raises:
        ConfigError: its class has no `inference_state` of its own.
    """
    if "inference_state" not in vars(type(module)):
        raise ConfigError(
            f"{what} is a {type(module).__name__}, which does not say what it keeps of earlier tokens",
            fix="generate with decoder_layer_spec's own layers, or give the class an `inference_state` "
            "(layers/inference_context)",
        )
    state: dict[str, StateSpec] = module.inference_state()
    return state


@dataclasses.dataclass(frozen=True, eq=False)
class InferenceContext:
    """A forward pass over n new tokens of each of b sequences.

    Attributes:
        state: layer number -> name -> what is kept: [rows, b, *shape] of tokens, [b, *shape] of sequences.
        position_ids: [b, n], where the new tokens stand.
        lengths: [b], how many of the n are a sequence's own, padding following; None where all are.
        slots: [n b], the row of each new token in a buffer of tokens seen as [rows b, *shape].
        keys: [m], the places of the m rows that are read.
        first: there are no earlier tokens: what is read is what has just been made.
    """

    state: Mapping[int, Mapping[str, torch.Tensor]]
    position_ids: torch.Tensor
    lengths: torch.Tensor | None
    slots: torch.Tensor
    keys: torch.Tensor
    first: bool
    _biases: dict[Any, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[b, 1, n, m], 0 where a new token sees a row and minus infinity where not; one for all layers alike.

        Args:
            window: rows at a distance of this or more are not seen.
            dtype: of the queries.
        """
        if (window, dtype) not in self._biases:
            places = self.position_ids[..., None]
            hidden = self.keys > places
            if window is not None:
                hidden = hidden | (self.keys <= places - window)
            bias = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)
            self._biases[window, dtype] = bias[:, None]
        return self._biases[window, dtype]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerState:
    """One layer's part of an `InferenceContext`: what the layer is given."""

    context: InferenceContext
    layer_number: int

    def write_tokens(self, **new: torch.Tensor) -> None:
        """Keep what was made of the new tokens, [n, b, *shape] each."""
        for name, rows in new.items():
            buffer = self.context.state[self.layer_number][name]
            buffer.flatten(0, 1).index_copy_(0, self.context.slots, rows.flatten(0, 1))

    def read_tokens(self, *names: str) -> tuple[torch.Tensor, ...]:
        """What is kept of all tokens, the new ones among them, [m, b, *shape] each; `bias` says who sees which."""
        m = len(self.context.keys)
        return tuple(self.context.state[self.layer_number][name][:m] for name in names)

    def write_sequences(self, **new: torch.Tensor) -> None:
        """Keep what each sequence is now, [b, *shape] each."""
        for name, value in new.items():
            self.context.state[self.layer_number][name].copy_(value)

    def read_sequences(self, *names: str) -> tuple[torch.Tensor, ...]:
        """What each sequence was before the new tokens, [b, *shape] each; zeros before the first."""
        return tuple(self.context.state[self.layer_number][name] for name in names)
