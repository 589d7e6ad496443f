"""AdamW and the squared norm over many tensors, each one launch. Kernels: `csrc/optimizer.cu`.

A table in the device's memory holds the addresses of chunks. It is built once (`AdamTable`, `NormTable`) and used as
long as the tensors keep their memory; building checks shapes, dtypes and contiguity, launching checks nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minimegatron.errors import require
from minimegatron.kernels.launch import DTYPES, accumulator, run

CHUNK = 1 << 16  # elements of a block's work


class AdamTable:
    """Where the main parameters, gradients, moments and model copies of a group lie.

    Args:
        main, exp_avg, exp_avg_sq: fp32 (or all fp64), contiguous, of equal shapes.
        grads: of main's dtype, or all of the model's.
        model: 16-bit copies that are written too, None where main is the parameter itself.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """

    def __init__(
        self,
        main: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avg: Sequence[torch.Tensor],
        exp_avg_sq: Sequence[torch.Tensor],
        model: Sequence[torch.Tensor] | None = None,
    ) -> None:
        columns = [list(c) for c in (main, grads, exp_avg, exp_avg_sq, *([model] if model is not None else []))]
        self.tensors = columns  # keeps the memory alive
        for name, column in zip(("main", "grads", "exp_avg", "exp_avg_sq", "model"), columns, strict=False):
            _check_column(name, column, columns[0])
        first = main[0] if main else torch.empty(0)
        self.device, self.state_dtype = first.device, first.dtype
        self.dtype = model[0].dtype if model else first.dtype
        grad_dtype = grads[0].dtype if grads else first.dtype
        require(
            self.state_dtype in (torch.float32, torch.float64) and accumulator(self.dtype) == self.state_dtype,
            f"AdamTable: main in {self.state_dtype}, model in {self.dtype}",
            "keep main and moments in fp32 (fp64 for fp64)",
        )
        for name, dtype in (("exp_avg", columns[2]), ("exp_avg_sq", columns[3])):
            require(
                all(t.dtype == self.state_dtype for t in dtype),
                f"AdamTable: {name} is not {self.state_dtype}",
                "cast it",
            )
        require(
            grad_dtype in (self.state_dtype, self.dtype),
            f"AdamTable: grads in {grad_dtype}",
            f"give {self.state_dtype}",
        )
        self.low_grad = grad_dtype != self.state_dtype
        rows = []
        for each in zip(*columns, strict=True):
            for start in range(0, each[0].numel(), CHUNK):
                at = [t.data_ptr() + start * t.element_size() for t in each]
                rows.append([*at[:4], at[4] if model is not None else 0, min(CHUNK, each[0].numel() - start)])
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 6).to(self.device)

    def step(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """One step in place, see `reference.adam_`.

        Args:
            step: from 1.
            grad_scale: fp64 scalar on the device that multiplies gradients (clipping, unscaling), default 1.
            nonfinite: fp64 scalar on the device; where it is not 0 nothing happens. The host waits for neither.
        """
        for name, scalar in (("grad_scale", grad_scale), ("nonfinite", nonfinite)):
            require(
                scalar is None
                or (scalar.dtype == torch.float64 and scalar.numel() == 1 and scalar.device == self.device),
                f"AdamTable.step: {name} is not one fp64 number on {self.device}",
                "see `optim.clip.grad_stats`",
            )
        if len(self.table):
            numbers = (lr, beta1, beta2, eps, weight_decay, step, int(self.low_grad), DTYPES[self.dtype])
            run("optimizer", "mm_adam", self.table, self.table, grad_scale, nonfinite, len(self.table), *numbers)


class NormTable:
    """Where tensors of one dtype lie, for `add_to`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        _check_column("tensors", self.tensors, self.tensors)
        self.dtype = self.tensors[0].dtype if self.tensors else torch.float32
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        rows = [
            [t.data_ptr() + start * t.element_size(), min(CHUNK, t.numel() - start)]
            for t in self.tensors
            for start in range(0, t.numel(), CHUNK)
        ]
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(self.device)
        self.partial = torch.empty(2 * len(rows), dtype=torch.float64, device=self.device)

    def add_to(self, out: torch.Tensor) -> None:
        """out += [sum of squares, how many elements are not finite], fp64 [2]."""
        require(out.dtype == torch.float64 and out.shape == (2,), f"out is {out.dtype} {tuple(out.shape)}", "fp64 [2]")
        if len(self.table):
            args = (self.table, self.partial, out, len(self.table), DTYPES[self.dtype])
            run("optimizer", "mm_squared_norm", self.table, *args)


def squared_norm(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of squares, how many elements are not finite), fp64 scalars; tensors of any mixture of dtypes."""
    device = tensors[0].device if tensors else torch.device("cpu")
    out = torch.zeros(2, dtype=torch.float64, device=device)
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        NormTable([t for t in tensors if t.dtype == dtype]).add_to(out)
    return out[0], out[1]


def _check_column(name: str, column: Sequence[torch.Tensor], main: Sequence[torch.Tensor]) -> None:
    require(len(column) == len(main), f"{len(column)} {name} for {len(main)} main parameters", "give one for each")
    for i, (x, p) in enumerate(zip(column, main, strict=True)):
        require(
            x.dtype in DTYPES and x.dtype == column[0].dtype and x.device == main[0].device,
            f"{name}[{i}] is {x.dtype} on {x.device}, {name}[0] {column[0].dtype} on {main[0].device}",
            "make a table for each dtype and device",
        )
        require(x.shape == p.shape, f"{name}[{i}] is {tuple(x.shape)}, main {tuple(p.shape)}", "give equal shapes")
        require(x.is_contiguous(), f"{name}[{i}] is not contiguous", "give its memory in order: .contiguous()")
