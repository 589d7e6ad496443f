"""fp32 numbers kept in fewer bits: read into fp32 for a step, rounded back after it.

The problem in a sentence: AdamW's moments change by a tenth and a thousandth of themselves in a step and only steer an
update, so 4 bytes each are more than they need; but fp16 and fp8 have so small a range that most gradients lie outside.

| kept as | rounding changes it by at most | down to              | scale        | bytes |
|---------|--------------------------------|----------------------|--------------|-------|
| fp32    | nothing                        | 2^-126               | none         | 4     |
| bf16    | 2^-8 of itself                 | 2^-126               | none         | 2     |
| fp16    | 2^-11 of itself                | 2^-28 of the largest | one a tensor | 2     |
| fp8     | 2^-4 of itself                 | 2^-14 of the largest | one a tensor | 1     |

Smaller numbers are rounded to multiples of 2^-10 (fp16) and 2^-3 (fp8) of that bound.

The scale is the smallest power of two that brings the largest magnitude of the tensor to at most half of fp16's
largest number, or to 448 in fp8 (e4m3):

    kept = round(x / scale)         x = kept * scale          scale = 2^ceil(log2(max|x| / range))

A power of two leaves every bit as it is, so what is kept, read and kept again is the same: a checkpoint holds fp32
numbers and loses none. Transformer Engine's scale is max|x| / range itself, which rounds once more.

**A second moment that is not 0 never becomes 0.** An embedding row whose token is rare has a tiny v and a smaller m.
Rounded to the nearest, v would be 0 before m is, and the update m / (sqrt(v) + eps) then a million times too large; so
numbers that are positive stop at the smallest one of their format.

**A bf16 weight is the upper half of its main parameter.** fp32 has bf16's sign and exponent and 16 more bits, so beside
the weight only these 16 bits have to be kept. The weight is rounded, not cut: the bits are a signed remainder.

    main = (weight << 16) + remainder            as integers; -32768 <= remainder < 32768

The main parameter is exact. A weight just between two bf16 numbers is rounded away from 0 (Transformer Engine's rule),
by torch's rule to the even one: one weight in 2^17 differs by its last bit.

Dettmers et al. 2022 (arXiv 2110.02861); DeepSeek-AI 2024 (arXiv 2412.19437), whose moments are bf16. Transformer
Engine: `transformer_engine/pytorch/optimizers/fused_adam.py`.
"""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# What the largest magnitude may become.
RANGE = {torch.float16: torch.finfo(torch.float16).max / 2, torch.float8_e4m3fn: 448.0}


class Stored:
    """A tensor of fp32 numbers.

    Args:
        x: the numbers; those in fp32 stay where they are.
        dtype: in which they are kept.
        positive: none is below 0, and none above 0 becomes 0.
    """

    def __init__(self, x: torch.Tensor, dtype: torch.dtype, positive: bool = False) -> None:
        self.data = x if x.dtype == dtype else torch.zeros_like(x, dtype=dtype)
        self._scale = torch.ones((), device=x.device) if dtype in RANGE else None
        self._least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if positive else None
        self.write(x)

    def read(self) -> torch.Tensor:
        """In fp32; the numbers themselves where they are kept so."""
        return self.data.float() if self._scale is None else self.data.float().mul_(self._scale)

    def write(self, x: torch.Tensor) -> None:
        """Keep these."""
        if self._scale is not None:
            self._scale.copy_(scale_of(x, RANGE[self.data.dtype]))
            kept = x / self._scale
            x = kept if self._least is None else torch.where(x > 0, kept.clamp(min=self._least), kept)
        if x is not self.data:
            self.data.copy_(x)


class Remainder:
    """The main parameter of a bf16 weight, kept as the weight and 16 bits.

    Args:
        weight: the model's; `write` sets it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.data = weight, torch.zeros_like(weight, dtype=torch.int16)

    def read(self) -> torch.Tensor:
        """In fp32."""
        return self.weight.view(torch.int16).int().bitwise_left_shift_(16).add_(self.data).view(torch.float32)

    def write(self, x: torch.Tensor) -> None:
        """Keep these, and round them into the weight."""
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
