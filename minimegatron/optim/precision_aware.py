"""AdamW on numbers that are kept in 8 or 16 bits (`--use-precision-aware-optimizer`).

The problem in a sentence: 12 of the 18 bytes that a parameter of a bf16 model costs are main parameter and moments, and
they are read once a step.

    kept (optim/stored.py)  ->  fp32  ->  torch's AdamW  ->  rounded back        one batch of parameters after the other

| of a parameter  | kept as                                                                   |
|-----------------|---------------------------------------------------------------------------|
| main            | its weight where that is fp32; 16 bits beside a bf16 weight; or fp16      |
| moments         | `exp_avg_dtype`, `exp_avg_sq_dtype`                                       |
| step            | an fp32 scalar                                                            |

The weight is the main parameter *as it is kept*, rounded: a run that goes on from a checkpoint has the same weights.

How far is it from AdamW in fp32? Each step rounds a moment by at most 2^-8 of itself in bf16 and 2^-4 in fp8. m forgets
such errors as it forgets gradients, within 1 / (1 - beta1) steps. v is harder to keep: where its gradients vanish a
step takes 1 - beta2 of it away, and what is less than half the distance to the next number is rounded off. That
distance is 2^-8 to 2^-7 of v in bf16 and 2^-4 to 2^-3 in fp8, so

    beta2 = 0.999   v in bf16 or fp8 never shrinks         beta2 = 0.95   v in bf16 does, in fp8 not always

and grows only where g^2 is several times v. A v that is too large makes steps too small. fp16 has no such limit.

In fp32 all of it is AdamW as it is, to the last bit of every main parameter.

Memory at the step: 12 bytes for each element of the parameters in a batch, which are `BATCH` elements or one parameter.

Megatron-LM: `OptimizerConfig.use_precision_aware_optimizer`, and Transformer Engine's `FusedAdam`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from minimegatron.config import OptimizerConfig
from minimegatron.optim.main_params import MainParam
from minimegatron.optim.stored import DTYPES, Remainder, Stored
from minimegatron.optim.update import Ready, batches

BATCH = 1 << 24  # elements


@dataclasses.dataclass(frozen=True)
class States:
    """What is kept of a parameter.

    Attributes:
        main: the weight itself where that is fp32.
        exp_avg, exp_avg_sq: moments.
        step: how many it has taken.
        weight: where `main` is rounded to; None where writing `main` has done it.
        has_main: `main` is no weight of the model.
    """

    main: Stored | Remainder
    exp_avg: Stored
    exp_avg_sq: Stored
    step: torch.Tensor
    weight: torch.Tensor | None
    has_main: bool

    @classmethod
    def of(cls, p: MainParam, config: OptimizerConfig) -> States:
        """Of a parameter that has not moved yet."""
        part = p.model_part
        has_main = part.dtype != torch.float32
        remainder = has_main and part.dtype == torch.bfloat16 and config.store_param_remainders
        if remainder and config.main_params_dtype == "fp32":
            main: Stored | Remainder = Remainder(part)
        else:
            main = Stored(part.float(), DTYPES[config.main_params_dtype] if has_main else torch.float32)
        zeros = torch.zeros_like(part, dtype=torch.float32)
        avg = Stored(zeros, DTYPES[config.exp_avg_dtype])
        avg_sq = Stored(zeros.clone(), DTYPES[config.exp_avg_sq_dtype], positive=True)
        weight = part if has_main and isinstance(main, Stored) else None
        return cls(main, avg, avg_sq, torch.zeros((), device=part.device), weight, has_main)

    def write_main(self, x: torch.Tensor) -> None:
        """Keep it, and round what is kept into the weight."""
        self.main.write(x)
        if self.weight is not None:
            self.weight.copy_(self.main.read())


class PrecisionAware:
    """See the module docstring.

    Args:
        params: all that are moved; `main` is the model's weight.
        groups: torch's, over `main`.
        config: dtypes, betas, eps.
    """

    def __init__(self, params: Sequence[MainParam], groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        self.param_groups = groups
        self._config = config
        self._group = {main: i for i, group in enumerate(groups) for main in group["params"]}
        self._states = {p.name: States.of(p, config) for p in params}

    def step(self, ready: Ready, factor: float) -> None:
        """See `Update`. Uses up the gradients."""
        for index, group in enumerate(self.param_groups):
            for members in batches([(p, grad) for p, grad in ready if self._group[p.main] == index], BATCH):
                self._move(group, members, factor)

    def _move(self, group: dict[str, Any], members: Ready, factor: float) -> None:
        states = [self._states[p.name] for p, _ in members]
        grads = [grad.float() for _, grad in members]
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        mains, avgs = [s.main.read() for s in states], [s.exp_avg.read() for s in states]
        squares = [s.exp_avg_sq.read() for s in states]
        adamw(
            mains,
            grads,
            avgs,
            squares,
            [],
            [s.step for s in states],
            fused=True,
            amsgrad=False,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._config.adam_eps,
            maximize=False,
        )
        for s, main, avg, square in zip(states, mains, avgs, squares, strict=True):
            s.write_main(main)
            s.exp_avg.write(avg)
            s.exp_avg_sq.write(square)

    def tensors(self, p: MainParam) -> dict[str, torch.Tensor]:
        s = self._states[p.name]
        found = {"step": s.step, "exp_avg": s.exp_avg.read(), "exp_avg_sq": s.exp_avg_sq.read()}
        return {**found, "fp32_param": s.main.read()} if s.has_main else found

    def load(self, p: MainParam, saved: Mapping[str, torch.Tensor]) -> None:
        s = self._states[p.name]
        s.step.copy_(saved["step"])
        s.exp_avg.write(saved["exp_avg"].to(s.step))
        s.exp_avg_sq.write(saved["exp_avg_sq"].to(s.step))
        if s.has_main:
            s.write_main(saved["fp32_param"].to(s.step))

    def reload(self, p: MainParam) -> None:
        s = self._states[p.name]
        if s.has_main:
            s.main.write(p.model_part.float())

    def held(self) -> dict[str, list[torch.Tensor]]:
        states = self._states.values()
        return {
            "main parameters": [s.main.data for s in states if s.has_main],
            "moments": [moment.data for s in states for moment in (s.exp_avg, s.exp_avg_sq)],
        }
