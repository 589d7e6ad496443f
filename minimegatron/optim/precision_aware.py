"""AdamW with its state in 8 or 16 bits (`--use-precision-aware-optimizer`).

The problem in a sentence: 12 of the 18 bytes that a parameter of a bf16 model costs are main parameter and moments,
and a step reads them once.

    stored  ->  fp32  ->  torch's AdamW  ->  rounded back            one batch of parameters after the other

| of a parameter  | stored as                                                                 |
|-----------------|---------------------------------------------------------------------------|
| main            | its weight where that is fp32; 16 bits beside a bf16 weight; or fp16      |
| moments         | `exp_avg_dtype`, `exp_avg_sq_dtype`                                       |
| step            | an fp32 scalar                                                            |

The range of fp16 and fp8 is so small that most gradients lie outside it, so these have a scale per tensor:

| dtype | rounding error at most | down to              | scale        | bytes |
|-------|------------------------|----------------------|--------------|-------|
| fp32  | none                   | 2^-126               | none         | 4     |
| bf16  | 2^-8 of the number     | 2^-126               | none         | 2     |
| fp16  | 2^-11 of the number    | 2^-28 of the largest | one a tensor | 2     |
| fp8   | 2^-4 of the number     | 2^-14 of the largest | one a tensor | 1     |

Smaller numbers are rounded to multiples of 2^-10 (fp16) and 2^-3 (fp8) of that bound. The scale is the smallest
power of two that brings the largest magnitude of the tensor to at most half of fp16's largest number, or to 448 in
fp8 (e4m3):

    stored = round(x / scale)       x = stored * scale        scale = 2^ceil(log2(max|x| / range))

Dividing by a power of two loses no bit, so a tensor that is read and stored again is unchanged, and a checkpoint of
fp32 numbers is exact. Transformer Engine's scale is max|x| / range itself, which rounds once more.

**A second moment above 0 never becomes 0.** An embedding row whose token is rare has a tiny v and a smaller m. Rounded
to nearest, v would be 0 before m is, and the update m / (sqrt(v) + eps) a million times too large; so positive numbers
stop at the smallest one of their format.

**A bf16 weight is the upper half of its main parameter.** fp32 has bf16's sign and exponent and 16 more bits, so only
these 16 bits are stored beside the weight. The weight is rounded, not cut: the bits are a signed remainder.

    main = (weight << 16) + remainder            as integers; -32768 <= remainder < 32768

The main parameter is exact. A weight halfway between two bf16 numbers is rounded away from 0 (Transformer Engine's
rule), by torch to the even one: one weight in 2^17 differs in its last bit. Otherwise the weight is the main parameter
*as stored*, rounded, so a run that resumes from a checkpoint has the same weights.

**How far is it from AdamW in fp32?** Each step rounds a moment by at most 2^-8 of itself in bf16 and 2^-4 in fp8. m
forgets such errors as it forgets gradients, within 1 / (1 - beta1) steps. v does not: where its gradients vanish, a
step takes 1 - beta2 of it away, and less than half the distance to the next number is rounded off. That distance is
2^-8 to 2^-7 of v in bf16 and 2^-4 to 2^-3 in fp8, so

    beta2 = 0.999   v in bf16 or fp8 never shrinks         beta2 = 0.95   v in bf16 does, in fp8 not always

and grows only where g^2 is several times v. A v that is too large makes steps too small. fp16 has no such limit. In
fp32 all of it is AdamW, to the last bit of every main parameter.

Memory of the step: 12 bytes for each element of a batch, which is `BATCH` elements or one parameter.

Dettmers et al. 2022 (arXiv 2110.02861); DeepSeek-AI 2024 (arXiv 2412.19437), whose moments are bf16. Megatron-LM:
`OptimizerConfig.use_precision_aware_optimizer`; Transformer Engine:
`transformer_engine/pytorch/optimizers/fused_adam.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from minimegatron.config import OptimizerConfig
from minimegatron.optim.main_params import MainParam, Ready, batches

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# What the largest magnitude may become.
RANGE = {torch.float16: torch.finfo(torch.float16).max / 2, torch.float8_e4m3fn: 448.0}


class Stored:
    """A tensor of fp32 numbers, stored in `dtype`.

    Args:
        x: the numbers; in fp32 they are not copied.
        dtype: of the storage.
        positive: numbers are at least 0, and none above 0 becomes 0.
    """

    def __init__(self, x: torch.Tensor, dtype: torch.dtype, positive: bool = False) -> None:
        self.data = x if x.dtype == dtype else torch.zeros_like(x, dtype=dtype)
        self._scale = torch.ones((), device=x.device) if dtype in RANGE else None
        self._least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if positive else None
        self.write(x)

    def read(self) -> torch.Tensor:
        """The numbers in fp32; the stored tensor itself if its dtype is fp32."""
        return self.data.float() if self._scale is None else self.data.float().mul_(self._scale)

    def write(self, x: torch.Tensor) -> None:
        """Store x."""
        if self._scale is not None:
            self._scale.copy_(scale_of(x, RANGE[self.data.dtype]))
            kept = x / self._scale
            x = kept if self._least is None else torch.where(x > 0, kept.clamp(min=self._least), kept)
        if x is not self.data:
            self.data.copy_(x)


class Remainder:
    """The main parameter of a bf16 weight, stored as the weight and 16 bits.

    Args:
        weight: the model's weight; `write` sets it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.data = weight, torch.zeros_like(weight, dtype=torch.int16)

    def read(self) -> torch.Tensor:
        """The main parameter in fp32."""
        return self.weight.view(torch.int16).int().bitwise_left_shift_(16).add_(self.data).view(torch.float32)

    def write(self, x: torch.Tensor) -> None:
        """Store x, and round it into the weight."""
        bits = x.view(torch.int32)
        self.data.copy_(bits)  # the lower half
        self.weight.view(torch.int16).copy_((bits - self.data).bitwise_right_shift_(16))


def scale_of(x: torch.Tensor, most: float) -> torch.Tensor:
    """The smallest power of two whose quotient with every |x| is at most `most`; 1 for zeros."""
    if not x.numel():
        return torch.ones((), device=x.device)
    mantissa, exponent = torch.frexp(x.abs().max() / most)
    exponent = exponent - (mantissa == 0.5).int()  # mantissas are in [0.5, 1)
    return (exponent.clamp(min=-126) + 127 << 23).view(torch.float32)


BATCH = 1 << 24  # elements


@dataclasses.dataclass(frozen=True)
class States:
    """The stored state of a parameter.

    Attributes:
        main: the weight itself if that is fp32.
        exp_avg, exp_avg_sq: moments.
        step: number of steps taken.
        weight: receives `main`, rounded; None if writing `main` sets it already.
        has_main: `main` is not the model's weight itself.
    """

    main: Stored | Remainder
    exp_avg: Stored
    exp_avg_sq: Stored
    step: torch.Tensor
    weight: torch.Tensor | None
    has_main: bool

    @classmethod
    def of(cls, p: MainParam, config: OptimizerConfig) -> States:
        """The state of a parameter before its first step."""
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
        """Store x, and round what is stored into the weight."""
        self.main.write(x)
        if self.weight is not None:
            self.weight.copy_(self.main.read())


class PrecisionAware:
    """AdamW on stored state, as in the module docstring.

    Args:
        params: `main` of each is the model's weight.
        groups: torch's parameter groups, of `main`.
        config: dtypes, betas, eps.
    """

    def __init__(self, params: Sequence[MainParam], groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        self.param_groups = groups
        self._config = config
        self._group = {main: i for i, group in enumerate(groups) for main in group["params"]}
        self._states = {p.name: States.of(p, config) for p in params}

    def step(self, ready: Ready, factor: float) -> None:
        """See `Update`. Consumes the gradients."""
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
        tensors = {"step": s.step, "exp_avg": s.exp_avg.read(), "exp_avg_sq": s.exp_avg_sq.read()}
        return {**tensors, "fp32_param": s.main.read()} if s.has_main else tensors

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
