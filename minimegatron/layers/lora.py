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

**Packed weights** (QLoRA). W is frozen, so only its products with x and dy are needed (`linear.PackedLinearFunction`),
and it may stay packed in 4 or 8 bits, beside adapters in the model's own precision (Dettmers et al. 2023, arXiv
2305.14314; their 4 bits are NF4, ours are whole numbers with a scale for each group).

**Merged**, W + (alpha / r) B A computes the same without a second product; it is exact up to rounding, and undone by
subtracting.

Hu et al. 2021 (arXiv 2106.09685). PEFT: `peft/tuners/lora/layer.py`. Megatron-Bridge: `peft/lora.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.errors import ConfigError
from minimegatron.kernels.quantized import Packed, Scheme
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
        weight: Any = layer.weight  # a parameter, or packed
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
        u = over_tp(F.linear(x, self.lora_A), self.tp, self.is_column, self.sequence_parallel)
        return self.scale * F.linear(u, self.spread())

    def spread(self) -> torch.Tensor:
        """B as [o / t, n r]: each row's r numbers under those of its part, 0 elsewhere."""
        return spread(self.lora_B, self.part_of_row, self.parts)

    def product(self) -> torch.Tensor:
        """(alpha / r) B A, this rank's part of it, as the layer's weight is cut."""
        return self.scale * (self.spread() @ self.lora_A)


def over_tp(u: torch.Tensor, tp: Axis, is_column: bool, sequence_parallel: bool) -> torch.Tensor:
    """u = x A^T between the two products, as the table above says: column [s', b, r] -> [s, b, r], row its inverse."""
    if is_column:
        return c.gather_from_sequence_region(u, tp) if sequence_parallel else c.copy_to_region(u, tp)
    return c.reduce_scatter_to_sequence_region(u, tp) if sequence_parallel else c.reduce_from_region(u, tp)


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

    Over etp they are cut as over tp: B as the rows of fc1, A as the columns of fc2. All ranks of etp have the same
    tokens, and each its own part of a sum, so the gradient of what is whole is summed over etp.

    Args:
        weight: the stack [E', o, i].
        rank, alpha: as in `Lora`.
    """

    def __init__(self, weight: nn.Parameter, rank: int, alpha: float) -> None:
        super().__init__()
        whole = layout_of(weight)
        (e, o, i), self.scale = whole.shape, alpha / rank
        of_rows, inputs_cut = part_of_rows(whole.one_expert), whole.dim == 2
        here = ((0, o),) if inputs_cut else whole.parts[whole.rank]
        self.parts = int(of_rows.max()) + 1
        self.part_of_row = np.concatenate([of_rows[first:last] for first, last in here])
        a = ParamLayout((e, self.parts * rank, i), init=Init(std=1 / math.sqrt(i)), experts=whole.experts, added=True)
        b = ParamLayout((e, o, rank), experts=whole.experts, added=True)
        cut: dict[str, Any] = {"dim": whole.dim, "parts": whole.parts, "rank": whole.rank}
        a = dataclasses.replace(a, **(cut if inputs_cut else {"partial": "experts"}))
        b = dataclasses.replace(b, **({"partial": "experts"} if inputs_cut else cut))
        self.lora_A, self.lora_B = new_parameter(a, weight.dtype), new_parameter(b, weight.dtype)

    def product(self) -> torch.Tensor:
        """(alpha / r) B A of each expert, [E', o, i]."""
        return self.scale * (spread(self.lora_B, self.part_of_row, self.parts) @ self.lora_A)


def add_lora(stage: Any, config: TransformerConfig) -> None:
    """Give the layers that `lora_target_modules` names their thin matrices.

    Raises:
        ConfigError: a layer computes by another library; or no layer of the stage has an adapter, so that nothing of it
            would learn.
    """
    if config.lora_rank is None:
        return
    rank, alpha = config.lora_rank, config.lora_alpha
    for name, module in list(stage.named_modules()):
        if isinstance(module, Experts) and "experts" in config.lora_target_modules:
            module.lora1 = ExpertLora(module.weight1, rank, alpha)
            module.lora2 = ExpertLora(module.weight2, rank, alpha)
        elif name.rpartition(".")[2] in config.lora_target_modules:
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                raise ConfigError(
                    f"lora_target_modules: {name} is a {type(module).__name__}, which takes no adapter",
                    fix="the layers of --transformer-impl local",
                )
            module.lora = Lora(module, rank, alpha)
    if stage.layers and not any(isinstance(module, (Lora, ExpertLora)) for module in stage.modules()):
        raise ConfigError(
            f"none of the layers {', '.join(map(str, stage.layers))} has one of lora_target_modules "
            f"({', '.join(config.lora_target_modules)}): nothing would learn there",
            fix="stages with attention, an MLP or experts, or no lora_rank",
        )


NUMBERS = "linear_kv_up_proj"  # a matrix whose halves are used separately, and which is not packed


def scheme_of_base(config: TransformerConfig) -> Scheme:
    """How the matrices of a model with `lora_base` are packed."""
    assert config.lora_base_bits is not None, "the configuration has checked it"
    return Scheme("int", config.lora_base_bits, config.lora_base_group_size)


def pack_base(stage: nn.Module, config: TransformerConfig) -> None:
    """Replace the matrices of linear layers by packed ones, which `checkpoint/packed.read_base` fills."""
    if config.lora_base is None:
        return
    scheme = scheme_of_base(config)
    for name, module in stage.named_modules():
        if not isinstance(module, ParallelLinear) or name.rpartition(".")[2] == NUMBERS:
            continue
        assert isinstance(module.weight, nn.Parameter)
        layout, dtype = layout_of(module.weight), module.weight.dtype
        first = layout.parts[layout.rank][0][0] if layout.dim == 1 else 0
        packed = Packed.empty(layout.local_shape, scheme, dtype, first)  # type: ignore[arg-type]
        packed.param_layout = layout
        del module.weight
        module.weight = packed  # type: ignore[assignment]


def packed_of(model: nn.Module) -> list[Packed]:
    """The packed weights of a model."""
    return [module.weight for module in model.modules() if isinstance(getattr(module, "weight", None), Packed)]  # type: ignore[misc]


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Their words and scales."""
    return [tensor for packed in packed_of(model) for tensor in (packed.words, packed.scale)]


def adapted(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(weight, its `Lora` or `ExpertLora`) of every layer that has one."""
    for module in model.modules():
        if isinstance(module, ParallelLinear) and module.lora is not None:
            yield module.weight, module.lora
        elif isinstance(module, Experts) and module.lora1 is not None:
            yield from ((module.weight1, module.lora1), (module.weight2, module.lora2))


@torch.no_grad()
def merge(model: nn.Module, sign: float = 1.0) -> None:
    """Add every adapter's product to its weight; with sign -1 subtract it. The adapters stay as they are.

    Raises:
        ConfigError: a weight is packed: a sum is no multiple of its scales.
    """
    if packed_of(model):
        raise ConfigError(
            "adapters beside packed weights are not merged: the sum is no multiple of the scales",
            fix="minimegatron lora merge --dequantize, which merges them into the dequantised weights",
        )
    for weight, lora in adapted(model):
        weight.add_(lora.product().to(weight.dtype), alpha=sign)
