"""The scale of one tensor of a layer, by recipe; and the delayed scales of a whole model in one tensor.

Delayed scaling, for three tensors a layer::

    amax of each use          hist[0] = max(hist[0], amax)          no communication
    end of a step             hist[0] = max over ranks              one flat all-reduce, 4 bytes a tensor
                              a = max(hist);  scale = top / 2^margin / a    where a is finite and not 0
                              hist moves on by one; hist[0] = 0

To update the tensors one by one costs a GPU thirty launches each. So their states are columns of one tensor, which is
updated by a dozen launches and one message:

    values [1 + H, n]      row 0       scales
                           row 1       largest magnitudes of this step, which casts write      <- the message
                           rows 2..    the history, oldest first
    buffers of a layer     scale = values[0, i],   amax_history = values[1:, i]                views

A state dict has the names and shapes of the views, `...fp8.input.scale` [] and `...fp8.input.amax_history` [H]; a
format that refuses shared memory wants clones. Addresses stay from the first step on, which a CUDA graph needs.

A module that moves to another device takes its buffers along one by one. They are then no longer views of one tensor,
which is right though slow, and the next step puts them together again (`together`).

Micikevicius et al. 2022 (arXiv 2209.05433). Transformer Engine: `fp8.py`, `FP8GlobalStateManager`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.errors import require
from minimegatron.kernels import reference
from minimegatron.layers.fp8.matmul import Fp8Recipe, Quantised, cast, cast_at_once, cast_tiles


class Scaling(nn.Module):
    """Chooses the scale of one tensor: x [m, n] -> x in FP8, for a product that sums over n."""

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype) -> None:
        super().__init__()
        self.recipe, self.dtype = recipe, dtype

    def forward(self, x: torch.Tensor) -> Quantised:
        raise NotImplementedError


class TileScales(Scaling):
    """A power of two for every tile; `tile` [rows, columns]."""

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype, tile: tuple[int, int], rule: str) -> None:
        super().__init__(recipe, dtype)
        self.tile, self.rule = tile, rule

    def forward(self, x: torch.Tensor) -> Quantised:
        return cast_tiles(x, self.tile, self.dtype, self.rule, self.recipe.kernels)


class CurrentScale(Scaling):
    """The scale of the tensor itself; the ranks of `axis` hold parts of it."""

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype, axis: Axis) -> None:
        super().__init__(recipe, dtype)
        self.axis = axis

    def forward(self, x: torch.Tensor) -> Quantised:
        return cast_at_once(x, self.dtype, self.recipe.margin, self.axis, self.recipe.kernels)


@dataclasses.dataclass(frozen=True, eq=False)
class Siblings:
    """`number` matrices in one place of the model, such as the experts of a layer."""

    number: int = 1


class DelayedScale(Scaling):
    """A scale from earlier steps. Scale and history are saved with the model, so a resumed run continues with them.

    In training the amax of this step is recorded; a second forward pass (recompute) uses the same scale and changes
    nothing, because maxima are idempotent.

    Args:
        recipe: length of the history, algorithm, margin.
        dtype: the FP8 format.
        siblings, index: its number among its siblings, if ranks have different ones: see `Scales`.
    """

    amax_history: torch.Tensor
    scale: torch.Tensor

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype, siblings: Siblings | None = None, index: int = 0) -> None:
        super().__init__(recipe, dtype)
        self.siblings, self.index = siblings or Siblings(), index
        self.whole: Scales | None = None
        # On the CPU also where a model is built on the meta device: these are values, not places for values.
        self.register_buffer("amax_history", torch.zeros(recipe.history, device="cpu"))
        self.register_buffer("scale", torch.ones((), device="cpu"))

    def forward(self, x: torch.Tensor) -> Quantised:
        seen = self.amax_history[0] if self.training else None
        return cast(x, self.scale, self.dtype, self.recipe.kernels, seen)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> DelayedScale:
        """Move values to another device with the module; `half()` does not round them, `to_empty` does not lose
        them."""
        device = fn(self.scale).device
        if device.type != "meta":
            self.amax_history, self.scale = self.amax_history.to(device), self.scale.to(device)
        return self


class Scales:
    """Scales and histories of many tensors, of one recipe and on one device, in one tensor; see the module docstring.

    **The message** has a place for every tensor; for an expert's tensor it has one for each of the E experts, and a
    rank fills that of its own: ranks of ep hold different experts in the same places of the model, and only ranks with
    the same expert agree.

    Args:
        states: their buffers become views.
    """

    def __init__(self, states: Sequence[DelayedScale]) -> None:
        recipe, device = states[0].recipe, states[0].scale.device
        assert all(s.recipe == recipe and s.scale.device == device for s in states), "one recipe, one device"
        self.recipe = recipe
        self.values = torch.stack([torch.cat([s.scale[None], s.amax_history]) for s in states], 1)
        tops = [reference.FP8_TOP[s.dtype] / 2**recipe.margin for s in states]
        self.tops = torch.tensor(tops, dtype=torch.float32, device=device)
        for i, state in enumerate(states):
            state.scale, state.amax_history, state.whole = self.values[0, i], self.values[1:, i], self
        begins: dict[Siblings, int] = {}
        places, self.message = [], 0
        for state in states:
            if state.siblings not in begins:
                begins[state.siblings] = self.message
                self.message += state.siblings.number
            places.append(begins[state.siblings] + state.index)
        straight = places == list(range(self.message))
        self.places = None if straight else torch.tensor(places, device=device)

    def holds(self, states: Sequence[DelayedScale]) -> bool:
        """Whether the tensor is that of these states, and their buffers are still views of it."""
        at, n = self.values.data_ptr(), self.values.shape[1]
        return len(states) == n and all(
            s.whole is self and s.scale.data_ptr() == at + 4 * i and s.amax_history.data_ptr() == at + 4 * (n + i)
            for i, s in enumerate(states)
        )

    @torch.no_grad()
    def move(self, axis: Axis) -> None:
        """End of a step: the ranks of `axis` agree, scales and histories are updated. The host does not wait."""
        scale, now, history = self.values[0], self.values[1], self.values[1:]
        now.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks could lose a NaN
        if self.places is None:
            all_reduce(now, axis, "max")
        else:
            places = now.new_zeros(self.message).index_copy_(0, self.places, now)
            now.copy_(all_reduce(places, axis, "max")[self.places])
        amax = history.amax(0) if self.recipe.algorithm == "max" else now
        new = (self.tops / amax).clamp_(max=torch.finfo(torch.float32).max)
        torch.where((amax > 0) & (amax < torch.inf), new, scale, out=scale)
        # An overflow is not worth remembering: it would keep the scale where it is for as long as the history is.
        now.masked_fill_(now == torch.inf, 0.0)
        history.copy_(history.roll(-1, 0))
        now.zero_()


def together(states: Sequence[DelayedScale]) -> Scales:
    """The tensor of which these states are views; a new one if they no longer are.

    Raises:
        ConfigError: a scale is not fp32, as after `load_state_dict(..., assign=True)` of rounded ones.
    """
    wrong = {str(t.dtype) for s in states for t in (s.scale, s.amax_history) if t.dtype != torch.float32}
    require(not wrong, f"scales of FP8 in {', '.join(sorted(wrong))}", "load them in float32: they are not weights")
    whole = states[0].whole
    return whole if whole is not None and whole.holds(states) else Scales(states)


def scaling_of(recipe: Fp8Recipe, which: str, axis: Axis, **place: Any) -> Scaling:
    """The `Scaling` of a layer's input, weight or gradient.

    Args:
        axis: ranks that hold parts of the tensor, for current scaling.
        place: `siblings` and `index` of delayed scaling.
    """
    dtype = recipe.dtype(which == "gradient")
    if recipe.kind == "delayed":
        return DelayedScale(recipe, dtype, **place)
    if recipe.kind == "current":
        return CurrentScale(recipe, dtype, axis)
    if recipe.kind == "mx":
        return TileScales(recipe, dtype, (1, 32), "mx")
    return TileScales(recipe, dtype, (128, 128) if which == "weight" else (1, 128), "power")
