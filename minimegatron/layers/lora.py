"""LoRA: a frozen matrix, and beside it the product of two thin ones that learn.

    y = x W^T + (alpha / r) (x A^T) B^T         W [o, i] frozen      A [r, i] drawn      B [o, r] = 0 at the beginning

A has its memory, its gradient and its moments times r / o of the matrix's, and so has B; the first step changes B
alone, because B is 0.

**Cut over tp**, A and B follow the matrix beside which they stand, and r numbers a token travel:

| layer  | A                | B               | u = x A^T                                                           |
|--------|------------------|-----------------|---------------------------------------------------------------------|
| column | whole            | cut, as W's rows | with sequence parallelism of own tokens, then gathered; its gradient |
|        |                  |                 | is summed over tp, because each rank uses it for its own outputs    |
| row    | cut, W's columns | whole           | a partial sum: it is summed over tp, like y                         |

**Packed matrices.** Our QKV matrix is q, k and v, and fc1 of a gated MLP is gate and up. Published adapters have an A
and a B for each of them. So a packed layer has n = 3 or 2 times r rows of A, and a row of B belongs to one part: it is
multiplied by that part's r numbers (`spread`). Then ours are theirs, with other rows (`checkpoint/peft`).

**Merged**, W + (alpha / r) B A computes the same without a second product; it is exact up to rounding, and undone by
subtracting.

Hu et al. 2021 (arXiv 2106.09685). PEFT: `peft/tuners/lora/layer.py`. Megatron-Bridge: `peft/lora.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.errors import ConfigError, require
from minimegatron.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from minimegatron.layers.moe.layer import Experts
from minimegatron.layers.param import Init, ParamLayout, layout_of, new_parameter

if TYPE_CHECKING:
    from minimegatron.config import TransformerConfig


class Lora(nn.Module):
    """The thin matrices beside one linear layer.

    Args:
        layer: a column- or row-parallel layer; its weight says shape and cut.
        rank: r.
        alpha: the scale times r.

    Attributes:
        parts: n, how many matrices the layer packs.
        part_of_row: [o / t] which of them each of this rank's rows belongs to, an array of the host.
    """

    def __init__(self, layer: ParallelLinear, rank: int, alpha: float) -> None:
        super().__init__()
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        whole = layout_of(weight)
        self.tp: Axis = layer.tp  # type: ignore[assignment]
        self.sequence_parallel: bool = layer.sequence_parallel  # type: ignore[assignment]
        self.is_column, self.rank, self.scale = isinstance(layer, ColumnParallelLinear), rank, alpha / rank
        (o, i), of_rows = whole.shape, part_of_rows(whole)
        here = whole.parts[whole.rank] if whole.dim == 0 and whole.parts else ((0, o),)
        self.parts = int(of_rows.max()) + 1
        self.part_of_row = np.concatenate([of_rows[a:b] for a, b in here])
        start, dtype = Init(std=1 / math.sqrt(i)), weight.dtype
        if self.is_column:
            a = ParamLayout((self.parts * rank, i), init=start, partial="sequence", added=True)
            b = ParamLayout((o, rank), 0, whole.parts, whole.rank, added=True)
        else:
            a = ParamLayout((self.parts * rank, i), 1, whole.parts, whole.rank, start, added=True)
            b = ParamLayout((o, rank), partial="sequence", added=True)
        self.lora_A, self.lora_B = new_parameter(a, dtype), new_parameter(b, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's y: column [s', b, i] -> [s, b, o/t], row [s, b, i/t] -> [s', b, o]."""
        u = F.linear(x, self.lora_A)
        if self.is_column:
            u = c.gather_from_sequence_region(u, self.tp) if self.sequence_parallel else c.copy_to_region(u, self.tp)
        elif self.sequence_parallel:
            u = c.reduce_scatter_to_sequence_region(u, self.tp)
        else:
            u = c.reduce_from_region(u, self.tp)
        return self.scale * F.linear(u, self.spread())

    def spread(self) -> torch.Tensor:
        """B as [o / t, n r]: each row's r numbers under those of its part, 0 elsewhere."""
        return spread(self.lora_B, self.part_of_row, self.parts)

    def product(self) -> torch.Tensor:
        """(alpha / r) B A, this rank's part of it, as the layer's weight is cut."""
        return self.scale * (self.spread() @ self.lora_A)


def spread(b: torch.Tensor, part_of_row: np.ndarray, parts: int) -> torch.Tensor:
    """[..., o, r] -> [..., o, n r]: the r numbers of each row in the columns of its part, 0 in the others."""
    if parts == 1:
        return b
    mine = torch.tensor((part_of_row[:, None] == np.arange(parts)).tolist(), dtype=b.dtype, device=b.device)
    return (mine[:, :, None] * b[..., None, :]).flatten(-2)


def part_of_rows(layout: ParamLayout) -> np.ndarray:
    """[o] which of the matrices that a logical matrix packs each of its rows belongs to."""
    rows = np.arange(layout.shape[0])  # numbers of the host: a model may be built, or run, on tensors without numbers
    if layout.fused:
        place = rows % sum(layout.fused)
        return np.searchsorted(np.cumsum(layout.fused), place, side="right")
    halves = len(layout.parts[layout.rank]) if layout.dim == 0 and layout.parts else 1
    return rows // (layout.shape[0] // halves)


class ExpertLora(nn.Module):
    """The same for a stack of experts: A [E, r, i] and B [E, o, r], for the experts of this rank.

    Args:
        weight: the stack [E', o, i].
        rank, alpha: as in `Lora`.
    """

    def __init__(self, weight: nn.Parameter, rank: int, alpha: float) -> None:
        super().__init__()
        whole = layout_of(weight)
        (e, o, i), self.scale = whole.shape, alpha / rank
        rows = part_of_rows(whole.one_expert)
        self.parts, self.part_of_row = int(rows.max()) + 1, rows
        start = Init(std=1 / math.sqrt(i))
        a = ParamLayout((e, self.parts * rank, i), init=start, experts=whole.experts, added=True)
        b = ParamLayout((e, o, rank), experts=whole.experts, added=True)
        self.lora_A, self.lora_B = new_parameter(a, weight.dtype), new_parameter(b, weight.dtype)

    def product(self) -> torch.Tensor:
        """(alpha / r) B A of each expert, [E', o, i]."""
        return self.scale * (spread(self.lora_B, self.part_of_row, self.parts) @ self.lora_A)


def add_lora(stage: nn.Module, config: TransformerConfig) -> None:
    """Give the layers that `lora_target_modules` names their thin matrices.

    Raises:
        ConfigError: on all ranks; a layer computes by another library, or experts are cut over etp.
    """
    if config.lora_rank is None:
        return
    rank, alpha = config.lora_rank, config.lora_alpha
    for name, module in list(stage.named_modules()):
        if isinstance(module, Experts) and "experts" in config.lora_target_modules:
            require(
                module.etp.size == 1,
                f"lora_target_modules experts with expert_tensor_parallel_size {module.etp.size}",
                "--expert-tensor-parallel-size 1: ep shares whole experts",
            )
            module.lora1 = ExpertLora(module.weight1, rank, alpha)
            module.lora2 = ExpertLora(module.weight2, rank, alpha)
        elif name.rpartition(".")[2] in config.lora_target_modules:
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                raise ConfigError(
                    f"lora_target_modules: {name} is a {type(module).__name__}, which takes no adapter",
                    fix="the layers of --transformer-impl local",
                )
            module.lora = Lora(module, rank, alpha)


def adapted(model: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """(weight, its `Lora` or `ExpertLora`) of every layer that has one."""
    for module in model.modules():
        if isinstance(module, ParallelLinear) and module.lora is not None:
            assert isinstance(module.weight, nn.Parameter)
            yield module.weight, module.lora
        elif isinstance(module, Experts) and module.lora1 is not None:
            yield from ((module.weight1, module.lora1), (module.weight2, module.lora2))


@torch.no_grad()
def merge(model: nn.Module, sign: float = 1.0) -> None:
    """Add every adapter's product to its weight; with sign -1 subtract it. The adapters stay as they are."""
    for weight, lora in adapted(model):
        weight.add_(lora.product().to(weight.dtype), alpha=sign)
