"""The optimizer's two passes over memory as two kernel launches: the norm of all gradients, and AdamW on everything.

The problem in a sentence: a step of AdamW reads and writes 34 bytes a parameter and computes next to nothing, so what
it costs is passes over memory and launches, and unscaling, clipping, the update and the rounded copy are four passes.

| kernel (`csrc/optimizer.cu`) | reads                    | writes                   | instead of                 |
|------------------------------|--------------------------|--------------------------|----------------------------|
| squared norm                 | gradients                | 16 bytes per 64 Ki       | `torch._foreach_norm`      |
| AdamW                        | gradients, main, moments | main, moments, bf16 copy | scaling, AdamW, and a copy |

A launch covers many tensors through a table of their addresses. Gradients are views into the data-parallel buffer and
never move, so a table is made once; it is made again where an address has changed.

What comes out is what `optim/optimizer.py` and `optim/clip.py` say, and the state stays where torch's optimizer keeps
it: a checkpoint does not know which of the two has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.kernels.switch import kernels
from minimegatron.optim.main_params import MainParam

Key = tuple[tuple[int, int], ...]


def _key(tensors: Sequence[torch.Tensor]) -> Key:
    return tuple((t.data_ptr(), t.numel()) for t in tensors)


class NormReader:
    """Squares and broken numbers of gradients, piece by piece, in one launch a dtype.

    Args:
        backend: `config.kernels`.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._tables: dict[torch.dtype, tuple[Key, Any]] = {}

    def read(self, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
        """Of every piece: sum of squares, elements that are not finite (fp64); and the order of the gradients in them.

        None where torch is to compute: a backend that says so, or tensors that kernels do not take.
        """
        ops = kernels(self._backend, "optimizer", grads[0])
        if ops is None or not all(kernels(self._backend, "optimizer", g) and g.is_contiguous() for g in grads):
            return None
        found, order = [], []
        for dtype in dict.fromkeys(g.dtype for g in grads):
            mine = [i for i, g in enumerate(grads) if g.dtype == dtype]
            key = _key([grads[i] for i in mine])
            if self._tables.get(dtype, (None,))[0] != key:
                self._tables[dtype] = key, ops.NormTable([grads[i] for i in mine])
            table = self._tables[dtype][1]
            table.add_to(torch.zeros(2, dtype=torch.float64, device=table.device))
            found.append(table.partial.view(-1, 2))
            order += mine
        squares, broken = torch.cat(found).unbind(1)
        return squares, broken, tuple(order)


class FusedAdam:
    """AdamW by the kernel, on the state of torch's optimizer.

    Args:
        inner: torch's AdamW, whose groups say learning rate and weight decay at the time of a step; for any other this
            does not apply.
        backend: `config.kernels`.
    """

    def __init__(self, inner: Any, backend: str) -> None:
        self.inner, self._backend = inner, backend
        self._tables: dict[Any, tuple[Key, Any]] = {}
        self._steps: dict[torch.Tensor, int] = {}  # the host's copy of state["step"], to read it without a wait

    def forget(self) -> None:
        """The state has been loaded anew."""
        self._steps.clear()

    def applies(self, ready: Sequence[tuple[MainParam, torch.Tensor]]) -> ModuleType | None:
        """The kernels, if they can take all of these; else None."""
        if not ready or type(self.inner) is not torch.optim.AdamW:
            return None
        ops = kernels(self._backend, "optimizer", ready[0][0].main)
        mains = [p.main for p, _ in ready]
        tensors = [*mains, *(g for _, g in ready), *(p.model_part for p, _ in ready if p.is_copy)]
        fits = all(t.is_contiguous() and t.device == mains[0].device for t in tensors)
        return ops if fits and all(m.dtype == mains[0].dtype for m in mains) else None

    @torch.no_grad()
    def step(self, ops: ModuleType, ready: Sequence[tuple[MainParam, torch.Tensor]], factor: float) -> None:
        """One step with gradients times `factor`; model copies are written as well."""
        where = {p: i for i, group in enumerate(self.inner.param_groups) for p in group["params"]}
        together: dict[Any, list[tuple[MainParam, torch.Tensor]]] = {}
        for p, grad in ready:
            if p.main not in self._steps:
                self._steps[p.main] = int(self.inner.state[p.main]["step"].item())
            self._steps[p.main] += 1
            kind = (where[p.main], p.model.dtype if p.is_copy else None, self._steps[p.main])
            together.setdefault(kind, []).append((p, grad))
        scale = torch.full((), factor, dtype=torch.float64, device=ready[0][0].main.device)  # no copy
        for (index, copy, number), members in together.items():
            self._launch(ops, self.inner.param_groups[index], members, (index, copy), number, scale)

    def _launch(
        self,
        ops: ModuleType,
        group: dict[str, Any],
        members: list[tuple[MainParam, torch.Tensor]],
        kind: tuple[int, Any],
        number: int,
        scale: torch.Tensor,
    ) -> None:
        mains, grads = [p.main for p, _ in members], [g for _, g in members]
        moments = [[self.inner.state[m][name] for m in mains] for name in ("exp_avg", "exp_avg_sq")]
        copies = [p.model_part for p, _ in members] if kind[1] is not None else None
        key = _key([*mains, *grads, *(copies or [])])
        if self._tables.get(kind, (None,))[0] != key:
            self._tables[kind] = key, ops.AdamTable(mains, grads, *moments, copies)
        beta1, beta2 = group["betas"]
        self._tables[kind][1].step(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=number,
            grad_scale=scale,
        )
        torch._foreach_add_([self.inner.state[m]["step"] for m in mains], 1.0)
        written = [*mains, *moments[0], *moments[1], *(copies or [])]
        torch.autograd.graph.increment_version(written)  # autograd has not seen these writes
