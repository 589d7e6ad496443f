"""Loss scaling: keep fp16 gradients out of both ends of fp16.

The problem in a sentence: fp16 holds nothing below 6e-8, and many gradients are smaller; they become 0 on the way back
through the network, and the weights behind them stop learning.

So the loss is multiplied by a scale S before the backward pass, every gradient comes out S times larger, and the fp32
copy is divided by S before it is used. The largest S that does not overflow (65,504) is best, and it changes during
training, so the scaler searches for it all the time:

    a gradient is inf or nan     skip the step; one hysteresis point less; at 0 or below: S = max(S * backoff, min)
    `growth_interval` clean steps in a row      S = S * growth, and the hysteresis points are refilled

The asymmetry is deliberate and easy to get wrong: hysteresis is refilled *only* when the scale grows. One overflow is
forgiven (with hysteresis=2), but after the points are spent every further overflow halves the scale at once.

Growing by powers of two costs no accuracy: only the exponent changes. bf16 has fp32's range and needs none of this.

**Sums.** The loss of a step is a sum over tokens (`training/step.py`). A sum over 8192 tokens is 8192 times a mean, and
so are its gradients: with the scale S that suits a mean they overflow 65504, and with a smaller one the scaler spends
its first thirty steps searching. So the sum is divided by `loss_divisor`, a power of two near the tokens of a
microbatch, before the backward pass, and the finished fp32 buffer is multiplied by it. Only exponents change; where
nothing over- or underflows the result is bit for bit the same, so bf16 and fp32, which have the range, do without
(divisor 1).

Micikevicius et al. 2017, arXiv 1710.03740. Megatron-LM: `megatron/core/optimizer/grad_scaler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from minimegatron.config import OptimizerConfig
from minimegatron.errors import CheckpointError, require


class GradScaler(Protocol):
    """A loss scale, and its reaction to overflows."""

    @property
    def scale(self) -> float:
        """The factor of the loss."""

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step; every rank must pass the same `found_inf`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ConstantGradScaler:
    """A scale that never changes; overflowing steps are still skipped."""

    def __init__(self, scale: float) -> None:
        require(scale > 0, f"loss_scale is {scale}", "must be positive")
        self.scale = float(scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the scale is a setting, not a state."""


class DynamicGradScaler:
    """A scale that searches for the largest value without overflow.

    Kept as a Python float on the host: the decision to skip a step is taken there anyway, and a power of two times a
    power of two is exact.

    Args:
        initial_scale, min_scale: first and smallest scale.
        growth_factor, growth_interval: multiply by this after so many clean steps in a row.
        backoff_factor, hysteresis: multiply by this after so many overflows.

    Raises:
        ConfigError: a value outside its range.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        require(
            0 < min_scale <= initial_scale,
            f"initial scale {initial_scale}, smallest scale {min_scale}",
            "choose 0 < min_loss_scale <= initial_loss_scale",
        )
        require(growth_factor > 1, f"growth_factor is {growth_factor}", "must be above 1")
        require(0 < backoff_factor < 1, f"backoff_factor is {backoff_factor}", "choose it between 0 and 1")
        require(growth_interval >= 1, f"loss_scale_window is {growth_interval}", "must be at least 1")
        require(hysteresis >= 1, f"hysteresis is {hysteresis}", "must be at least 1")
        self.scale = float(initial_scale)
        self.min_scale = min_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step; every rank must pass the same `found_inf`."""
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker, self._hysteresis_tracker = 0, self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint stopped.

        Raises:
            CheckpointError: the state is of no dynamic scaler.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise CheckpointError(
                f"the grad scaler's state lacks {', '.join(sorted(missing))}",
                fix="resume with the precision and loss_scale with which the checkpoint was written",
            )
        self.scale = float(state["scale"])
        self._growth_tracker = int(state["growth_tracker"])
        self._hysteresis_tracker = int(state["hysteresis_tracker"])


def build_grad_scaler(config: OptimizerConfig, fp16: bool) -> GradScaler | None:
    """Constant when `loss_scale` is given, dynamic for fp16, none otherwise."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def loss_divisor(dtype: torch.dtype, tokens: int) -> float:
    """The divisor of the loss before the backward pass: a power of 2 near `tokens` in fp16, else 1."""
    return 2.0 ** round(math.log2(tokens)) if dtype == torch.float16 else 1.0
