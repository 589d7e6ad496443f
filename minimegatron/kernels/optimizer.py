"""AdamW and the squared norm over many tensors, each one launch. Kernels: `csrc/optimizer.cu`.

The problem in a sentence: a step of AdamW reads and writes 34 bytes a parameter and computes next to nothing, so what
it costs is passes over memory and launches, and unscaling, clipping, the update and the rounded copy are four passes.

| kernel       | reads                    | writes                   | instead of                 |
|--------------|--------------------------|--------------------------|----------------------------|
| squared norm | gradients                | 16 bytes per 64 Ki       | `torch._foreach_norm`      |
| AdamW        | gradients, main, moments | main, moments, bf16 copy | scaling, AdamW, and a copy |

A table in the device's memory holds the addresses of chunks. It is built once (`AdamTable`, `NormTable`) and used as
long as the tensors keep their memory, as views into the data-parallel buffer do; building checks shapes, dtypes and
contiguity, launching checks nothing again. An optimizer keeps its tables from step to step in `Tables`.

The state stays where torch's optimizer keeps it: a checkpoint does not know which of the two has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels.operators import DTYPES, accumulator, run

CHUNK = 1 << 16  # elements of a block's work


class AdamTable:
    """The addresses of the main parameters, gradients, moments and model copies of a group.

    Args:
        main, exp_avg, exp_avg_sq: fp32 (or all fp64), contiguous, of equal shapes.
        grads: of main's dtype, or all of the model's.
        model: 16-bit copies that are written too, None if main is the parameter itself.

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
            nonfinite: fp64 scalar on the device; if it is not 0 nothing happens. The host waits for neither.
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
    """The addresses of tensors of one dtype, for `add_to`."""

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
        """out += [sum of squares, number of elements that are not finite], fp64 [2]."""
        require(out.dtype == torch.float64 and out.shape == (2,), f"out is {out.dtype} {tuple(out.shape)}", "fp64 [2]")
        if len(self.table):
            args = (self.table, self.partial, out, len(self.table), DTYPES[self.dtype])
            run("optimizer", "mm_squared_norm", self.table, *args)


def squared_norm(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of squares, number of elements that are not finite), fp64 scalars; tensors of any mixture of dtypes."""
    device = tensors[0].device if tensors else torch.device("cpu")
    out = torch.zeros(2, dtype=torch.float64, device=device)
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        NormTable([t for t in tensors if t.dtype == dtype]).add_to(out)
    return out[0], out[1]


# --------------------------------------------------------------------------------------- step after step (`ops.py`)


class Tables:
    """Tables of an optimizer's tensors, kept from step to step.

    Attributes:
        steps: main parameter -> the host's copy of its `state["step"]`, read without a wait; must be cleared when
            code other than `adamw_step` has written the state.
    """

    def __init__(self) -> None:
        self.steps: dict[torch.Tensor, int] = {}
        self._tables: dict[Any, tuple[Any, Any]] = {}

    def get(self, kind: Any, tensors: Sequence[torch.Tensor], make: Callable[[], Any]) -> Any:
        """The table of a kind, made again if a tensor has another address or size."""
        key = tuple((t.data_ptr(), t.numel()) for t in tensors)
        if self._tables.get(kind, (None,))[0] != key:
            self._tables[kind] = key, make()
        return self._tables[kind][1]


def squared_norms(grads: Sequence[torch.Tensor], tables: Tables) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """See `ops.squared_norms`; one launch a dtype."""
    read: list[torch.Tensor] = []
    order: list[int] = []
    for dtype in dict.fromkeys(g.dtype for g in grads):
        numbers = [i for i, g in enumerate(grads) if g.dtype == dtype]
        members = [grads[i] for i in numbers]
        table = tables.get(("norm", dtype), members, partial(NormTable, members))
        table.add_to(torch.zeros(2, dtype=torch.float64, device=table.device))
        read.append(table.partial.view(-1, 2))
        order += numbers
    squares, broken = torch.cat(read).unbind(1)
    return squares, broken, tuple(order)


@torch.no_grad()
def adamw_step(
    inner: torch.optim.AdamW,
    mains: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor | None],
    factor: float,
    tables: Tables,
) -> None:
    """See `ops.optimizer_step`; a launch for every group, dtype of the copies and number of steps taken."""
    group_of = {p: i for i, group in enumerate(inner.param_groups) for p in group["params"]}
    together: dict[Any, list[int]] = {}
    for i, (p, copy) in enumerate(zip(mains, copies, strict=True)):
        if p not in tables.steps:
            tables.steps[p] = int(inner.state[p]["step"].item())
        tables.steps[p] += 1
        kind = (group_of[p], None if copy is None else copy.dtype, tables.steps[p])
        together.setdefault(kind, []).append(i)
    scale = torch.full((), factor, dtype=torch.float64, device=mains[0].device)  # no copy
    for (index, dtype, number), members in together.items():
        main, grad = [mains[i] for i in members], [grads[i] for i in members]
        exp_avg, exp_avg_sq = ([inner.state[m][name] for m in main] for name in ("exp_avg", "exp_avg_sq"))
        rounded = None if dtype is None else [c for i in members if (c := copies[i]) is not None]
        tensors = [*main, *grad, *(rounded or [])]
        table = tables.get((index, dtype), tensors, partial(AdamTable, main, grad, exp_avg, exp_avg_sq, rounded))
        group = inner.param_groups[index]
        beta1, beta2 = group["betas"]
        table.step(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=number,
            grad_scale=scale,
        )
        torch._foreach_add_([inner.state[m]["step"] for m in main], 1.0)
        written = [*main, *exp_avg, *exp_avg_sq, *(rounded or [])]
        torch.autograd.graph.increment_version(written)  # autograd has not seen these writes


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
