"""Many adapters beside one set of weights: each row of a step has one of them, or none.

The problem in a sentence: a hundred tenants have a hundred adapters of one model, and a batch holds rows of many of
them; merged, each adapter would need a copy of the model and a batch of its own.

    y[row] = x[row] W^T  +  (x[row] A_k^T) B_k^T         k = the adapter of the row

    rows of a step     0  1  2  3  4  5  6                adapter      1  1  0  2  2  2  1
    sorted             0  1  6 | 3  4  5                  one product for each adapter of the step: `Segments`

The rows are sorted once a pass, on the host, and all layers use that order. So a step costs the product with W for all
rows together, and two thin products for each adapter that occurs, however many requests have it. Over tp the thin
matrices are cut, and u = x A^T travels, as in training (`layers/lora.over_tp`).

Adapters of smaller rank are padded with zeros to the largest. A packed matrix has an A for each of its parts, and its B
is stored spread over them, with the scale alpha / r in it.

Chen et al. 2023, Punica (arXiv 2310.18547); Sheng et al. 2023, S-LoRA (arXiv 2311.03285). vLLM: `vllm/lora/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.layers.linear import ColumnParallelLinear, ParallelLinear
from minimegatron.layers.lora import Lora, over_tp, spread
from minimegatron.layers.param import layout_of


class Segments(NamedTuple):
    """Rows that have an adapter, those of one adapter together.

    Attributes:
        rows: [k] their numbers.
        counts: (adapter, how many rows have it), on the host.
    """

    rows: torch.Tensor
    counts: tuple[tuple[int, int], ...]

    @staticmethod
    def of(adapters: np.ndarray, device: torch.device) -> Segments:
        """The segments of rows with these adapters; 0 is none."""
        order = np.argsort(adapters, kind="stable")
        order = order[np.count_nonzero(adapters == 0) :]
        names, counts = np.unique(adapters[order], return_counts=True)
        rows = torch.tensor(order.tolist(), dtype=torch.int64, device=device)
        return Segments(rows, tuple(zip(names.tolist(), counts.tolist(), strict=True)))

    def product(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [n, i], weights [K, o, i] -> [n, o]: each row by the matrix of its adapter; 0 for a row that has none."""
        y = x.new_zeros(len(x), weights.shape[1])
        if self.counts:
            parts = x[self.rows].split([count for _, count in self.counts])
            made = [F.linear(part, weights[k - 1]) for part, (k, _) in zip(parts, self.counts, strict=True)]
            y[self.rows] = torch.cat(made)
        return y


class Adapters:
    """The adapters of an engine, and which of them each row of the pass under way has; all layers have this one object.

    Args:
        names: of the adapters.
        tp: ranks that share the layers.
        sequence_parallel: a rank has its part of the rows between the layers.

    Attributes:
        every: the segments of all rows of the pass.
        own: those of this rank's rows; the same without sequence parallelism.
    """

    def __init__(self, names: Sequence[str], tp: Axis, sequence_parallel: bool) -> None:
        self.numbers = {"": 0} | {name: k for k, name in enumerate(names, 1)}
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.choose((), (), torch.device("cpu"))

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in their order."""
        return tuple(self.numbers)[1:]

    def choose(self, names: Sequence[str], new: Sequence[int], device: torch.device) -> None:
        """Say which adapter the rows of the next pass have.

        Args:
            names: of each sequence; "" for none.
            new: how many rows each sequence has; sequences without a name are padding.
            device: of the layers.
        """
        of_sequence = np.zeros(len(new), dtype=np.int64)
        of_sequence[: len(names)] = [self.numbers[name] for name in names]
        rows = np.repeat(of_sequence, np.array(new, dtype=np.int64))
        self.every = self.own = Segments.of(rows, device)
        if self.sequence_parallel:
            self.own = Segments.of(np.split(rows, self.tp.size)[self.tp.rank], device)


class Loras(nn.Module):
    """The thin matrices of all adapters beside one layer, for generation.

    Args:
        layer: a column- or row-parallel layer.
        adapters: which of them each row has.
        given: number of an adapter, from 1 on -> (its rank, its alpha, logical A, logical B), of those that adapt this
            layer; the others have zeros.

    Attributes:
        a: [K, n r, i], b: [K, o, n r], this rank's part; r is the largest rank, n the matrices that the layer packs.
    """

    def __init__(
        self,
        layer: ParallelLinear,
        adapters: Adapters,
        given: Mapping[int, tuple[int, float, torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.adapters, self.tp = adapters, adapters.tp
        self.is_column = isinstance(layer, ColumnParallelLinear)
        self.sequence_parallel: bool = layer.sequence_parallel  # type: ignore[assignment]
        self.rank = max(rank for rank, *_ in given.values())
        dtype: torch.dtype = layer.weight.dtype  # type: ignore[assignment]
        with torch.device("meta"):
            like = Lora(layer, self.rank, 1.0)
        a = torch.zeros(len(adapters.names), *like.lora_A.shape, dtype=dtype)
        b = torch.zeros(len(adapters.names), len(like.lora_B), like.lora_A.shape[0], dtype=dtype)
        for k, (rank, alpha, whole_a, whole_b) in given.items():
            with torch.device("meta"):
                lora = Lora(layer, rank, alpha)
            part = layout_of(lora.lora_A).take(whole_a)
            a[k - 1, : len(part)] = part
            wide = lora.scale * spread(layout_of(lora.lora_B).take(whole_b).float(), lora.part_of_row, lora.parts)
            b[k - 1, :, : len(part)] = wide
        self.a: torch.Tensor
        self.b: torch.Tensor
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    @property
    def reads_device(self) -> str:
        """Why a pass can be neither recorded nor compiled as a whole (`inference/runner`)."""
        return "which rows have which adapter is another in every step"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's y: column [s', b, i] -> [s, b, o/t], row [s, b, i/t] -> [s', b, o]."""
        every, own = self.adapters.every, self.adapters.own
        if not every.counts:
            return x.new_zeros(())
        before, after = (own, every) if self.is_column else (every, own)
        u = before.product(x.flatten(0, 1), self.a).unsqueeze(1)
        u = over_tp(u, self.tp, self.is_column, self.sequence_parallel)
        return after.product(u.squeeze(1), self.b).unflatten(0, (-1, x.shape[1]))
