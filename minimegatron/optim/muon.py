"""Muon: of a matrix, the step is the nearest orthogonal one to its momentum.

The problem in a sentence: the gradient of a weight matrix is dominated by a few directions, AdamW looks at each number
by itself, and the many directions in between learn slowly.

With the gradient G of a matrix W [m, n], its momentum M = U diag(s) V^T, rate r and weight decay w:

    M = mu M + (1 - mu) G                    momentum; with Nesterov the next line takes mu M + (1 - mu) G instead of M
    O = newton_schulz(M)  ~  U V^T           every singular value becomes about 1: all directions move equally far
    W = W - r w W - r scale(m, n) O

U V^T is not computed by an SVD but by a few products. An odd polynomial of a matrix acts on its singular values alone,

    X <- a X + b (X X^T) X + c (X X^T)^2 X        s <- a s + b s^3 + c s^5

and coefficients exist that bring everything in (0, 1] near 1 in five rounds (`config/optimizer`). X begins as
M / |M|, so that no singular value is above 1.

| `muon_scale_mode` | scale(m, n)        | the update's size                                                    |
|-------------------|--------------------|----------------------------------------------------------------------|
| `spectral`        | sqrt(max(m, n))    | elements near 1, as AdamW's; with a further factor 0.2 AdamW's rates |
| `shape_scaling`   | sqrt(max(1, m / n))| Jordan's original                                                    |
| `unit_rms_norm`   | sqrt(m / n)        | of outputs of unit inputs: 1                                         |

**Which matrices.** Every parameter with two dims but the word embedding and the output layer; each expert of a stack by
itself; q, k and v of a fused projection by themselves (`ParamLayout.fused`). The rest is AdamW's.

**Cut over tp** (`muon_tp_mode`), of a matrix of N elements whose smaller side is k:

| mode          | what travels                     | the step is that of...             |
|---------------|----------------------------------|------------------------------------|
| `duplicated`  | all-gather of N over tp          | the logical matrix, in every layout|
| `distributed` | all-reduces of the Gram matrices | the same, up to rounding           |
| `blockwise`   | nothing                          | each part by itself                |

Jordan 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv 2502.16982). Megatron-LM:
`megatron/core/optimizer/muon.py`, with the package `emerging_optimizers`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.config.optimizer import coefficients_of
from minimegatron.errors import require
from minimegatron.layers.param import ParamLayout

EPS = 1e-7
Coefficients = Sequence[tuple[float, float, float]]


def newton_schulz(
    x: torch.Tensor, coefficients: Coefficients, dtype: torch.dtype, axis: Axis | None = None, dim: int = -1
) -> torch.Tensor:
    """About U V^T of x = U diag(s) V^T.

    Args:
        x: [..., m, n]; each matrix by itself.
        coefficients: a, b, c of each round.
        dtype: of the products.
        axis: ranks that hold parts of x, which is cut along `dim`; None for a whole x.
        dim: -1 or -2.
    """
    transposed = x.shape[-2] > x.shape[-1] if axis is None else dim == -2
    y = x.mT if transposed else x
    y = y.reshape(-1, *y.shape[-2:])
    squares = y.square().sum((-2, -1), keepdim=True)
    if axis is not None:
        all_reduce(squares, axis)
    y = (y / squares.sqrt().clamp(min=EPS)).to(dtype)
    for a, b, c in coefficients:
        gram = y @ y.mT
        if axis is not None:
            all_reduce(gram, axis)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if transposed else y).reshape(x.shape).to(x.dtype)


def scale_of(m: int, n: int, mode: str) -> float:
    """The factor of the update of an [m, n] matrix; see the module docstring."""
    if mode == "spectral":
        return math.sqrt(max(m, n))
    return math.sqrt(m / n if mode == "unit_rms_norm" else max(1.0, m / n))


class Orthogonalizer:
    """The update of one parameter from its momentum.

    Args:
        name: for messages.
        layout: says which matrices it consists of, and how they are cut.
        mesh: the layout of ranks.
        config: how, in which precision and with which scale.

    Raises:
        ConfigError: the part of a rank does not consist of whole groups of q, k and v.
    """

    def __init__(self, name: str, layout: ParamLayout, mesh: Mesh, config: OptimizerConfig) -> None:
        self._config, self._shape = config, layout.local_shape
        self._layout = dataclasses.replace(layout, experts=None)  # the experts that are here are all that count
        self._axis = mesh.tp if layout.experts is None else mesh.etp
        self._mode = config.muon_tp_mode if layout.sharded else "whole"
        self._fused = layout.fused if config.muon_split_qkv else ()
        self._coefficients = coefficients_of(config.muon_coefficient_type, config.muon_num_ns_steps)
        rows = layout.local_shape[0]
        require(
            not self._fused or self._mode in ("whole", "duplicated") or rows % sum(self._fused) == 0,
            f"muon_tp_mode={self._mode!r}: {name!r} has {rows} rows on a rank, and a group of q, k, v has "
            f"{sum(self._fused)}",
            "--muon-tp-mode duplicated, or --muon-no-split-qkv",
        )

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """(How many, side of the Gram matrix, the other side) of what is iterated together."""
        layout, shape = self._layout, list(self._shape)
        if self._mode == "duplicated":
            shape[layout.dim or 0] *= self._axis.size
        *many, rows, columns = shape
        for part in self._fused or (rows,):
            m = rows // sum(self._fused) * part if self._fused else rows
            turned = layout.dim == len(shape) - 2 if self._mode == "distributed" else m > columns
            yield math.prod(many), *((columns, m) if turned else (m, columns))

    def products(self) -> Iterator[tuple[int, int, int, int]]:
        """For those who plan: (m, n, k, how many) of the products [m, k] x [k, n] of a call."""
        for count, k, side in self._sizes():
            for m, n, inner in ((k, k, side), (k, k, k), (k, side, k)):
                yield m, n, inner, count * len(self._coefficients)

    def messages(self) -> Iterator[tuple[str, Axis, int]]:
        """For those who plan: what a call sends, and its bytes."""
        if self._mode == "duplicated":
            yield "all_gather", self._axis, 4 * math.prod(self._shape) * self._axis.size
        element = 2 if self._config.muon_fp32_matmul_prec == "medium" else 4
        for count, k, _ in self._sizes() if self._mode == "distributed" else ():
            yield "all_reduce", self._axis, 4 * count
            yield from [("all_reduce", self._axis, element * count * k * k)] * len(self._coefficients)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of the momentum of this rank's part, the part of the scaled update."""
        if self._mode != "duplicated":
            return self._each(x)
        parts = list(all_gather(x[None], self._axis).unbind(0))
        return self._layout.take(self._each(self._layout.join(parts)))

    def _each(self, x: torch.Tensor) -> torch.Tensor:
        """q, k and v by themselves: rows come in groups of all three."""
        if not self._fused:
            return self._one(x)
        groups = x.unflatten(0, (-1, sum(self._fused)))
        parts = [self._one(part.flatten(0, 1)) for part in groups.split(self._fused, 1)]
        return torch.cat([part.unflatten(0, (len(groups), -1)) for part in parts], 1).flatten(0, 1)

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if self._config.muon_fp32_matmul_prec == "medium" else x.dtype
        size = list(x.shape[-2:])
        if self._mode == "distributed":
            assert self._layout.dim is not None, "a part is cut along a dim"
            dim = self._layout.dim - x.dim()
            size[dim] *= self._axis.size
            update = newton_schulz(x, self._coefficients, dtype, self._axis, dim)
        else:
            update = newton_schulz(x, self._coefficients, dtype)
        return update * (
            scale_of(size[0], size[1], self._config.muon_scale_mode) * self._config.muon_extra_scale_factor
        )


class Muon(torch.optim.Optimizer):
    """The step of the module docstring.

    Args:
        groups: torch's parameter groups, of matrices.
        updates: what makes the update of each parameter from its momentum.
        lr, momentum, nesterov: as in the module docstring.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        updates: Mapping[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]],
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0})
        self._updates = updates

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See the class."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                direction = p.grad.lerp(average, momentum) if group["nesterov"] else average
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(self._updates[p](direction), alpha=lr)
