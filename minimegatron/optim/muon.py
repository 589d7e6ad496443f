"""Muon: the step of a matrix is the nearest orthogonal matrix to its momentum.

The problem in a sentence: a few directions dominate the gradient of a weight matrix; AdamW scales each element by
itself, and the many other directions learn slowly.

With the gradient G of a matrix W [m, n], its momentum M = U diag(s) V^T, rate r and weight decay w:

    M = mu M + (1 - mu) G                    momentum; with Nesterov the next line takes mu M + (1 - mu) G instead of M
    O = newton_schulz(M)  ~  U V^T           every singular value becomes about 1: all directions move equally far
    W = W - r w W - r scale(m, n) O

U V^T is not computed by an SVD but by a few products. An odd polynomial of a matrix acts on its singular values alone,

    X <- a X + b (X X^T) X + c (X X^T)^2 X        s <- a s + b s^3 + c s^5

and coefficients exist that bring everything in (0, 1] near 1 in five rounds (`config/optimizer`). X begins as
M / |M|, so that no singular value is above 1.

| `muon_scale_mode` | scale(m, n)        | size of the update                                                   |
|-------------------|--------------------|----------------------------------------------------------------------|
| `spectral`        | sqrt(max(m, n))    | elements near 1, as AdamW's; with a further factor 0.2 AdamW's rates |
| `shape_scaling`   | sqrt(max(1, m / n))| Jordan's original                                                    |
| `unit_rms_norm`   | sqrt(m / n)        | of outputs of unit inputs: 1                                         |

**Which matrices.** Every parameter with two dims except the word embedding and the output layer. Each expert of a
stack counts as a matrix, and so do q, k and v of a fused projection (`ParamLayout.fused`). AdamW updates the rest.

**Cut over tp** (`muon_tp_mode`), of a matrix of N elements whose smaller side is k:

| mode          | messages                         | the step is that of...             |
|---------------|----------------------------------|------------------------------------|
| `duplicated`  | all-gather of N over tp          | the logical matrix, in every layout|
| `distributed` | all-reduces of the Gram matrices | the same, up to rounding           |
| `blockwise`   | none                             | each part by itself                |

**Sharded over replicas (`dist_muon`, `LayerWise`).** ZeRO cuts a buffer into equal ranges, but Muon needs whole
matrices; so each parameter has one owner among the replicas. Every replica has every gradient (a plain all-reduce).
Sorted by size, parameters are dealt to the D replicas forwards and then backwards, so that each owns about as much; of
nine parameters on three replicas, from the smallest:

    replica 0    a           f   g
    replica 1        b   e           h
    replica 2        c   d               i

An owner keeps main parameters and moments, takes the step, and broadcasts the new weights in the model's dtype over
`dp_cp` (over `edp` for experts, which are dealt over their own replicas).

Jordan 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv 2502.16982). Megatron-LM:
`megatron/core/optimizer/muon.py`, with the package `emerging_optimizers`, and
`megatron/core/optimizer/layer_wise_optimizer.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather, all_reduce, broadcast
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.config.optimizer import coefficients_of
from minimegatron.errors import require
from minimegatron.layers.param import ParamLayout, layout_of
from minimegatron.optim.torch_optimizers import Optimizer

EPS = 1e-7
Coefficients = Sequence[tuple[float, float, float]]


def newton_schulz(
    x: torch.Tensor, coefficients: Coefficients, dtype: torch.dtype, axis: Axis | None = None, dim: int = -1
) -> torch.Tensor:
    """An approximation of U V^T of x = U diag(s) V^T.

    Args:
        x: [..., m, n]; each matrix by itself.
        coefficients: a, b, c of each round.
        dtype: dtype of the products.
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
    """Computes the update of one parameter from its momentum.

    Args:
        name: for messages.
        layout: the matrices of which it consists, and how they are cut.
        mesh: the layout of ranks.
        config: mode, precision and scale.

    Raises:
        ConfigError: the part of a rank does not consist of whole groups of q, k and v.
    """

    def __init__(self, name: str, layout: ParamLayout, mesh: Mesh, config: OptimizerConfig) -> None:
        self._config, self._shape = config, layout.local_shape
        self._layout = dataclasses.replace(layout, experts=None)  # of this rank's experts alone
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
        """(Number of matrices, side of the Gram matrix, the other side) of each batch of iterations."""
        layout, shape = self._layout, list(self._shape)
        if self._mode == "duplicated":
            shape[layout.dim or 0] *= self._axis.size
        *many, rows, columns = shape
        for part in self._fused or (rows,):
            m = rows // sum(self._fused) * part if self._fused else rows
            turned = layout.dim == len(shape) - 2 if self._mode == "distributed" else m > columns
            yield math.prod(many), *((columns, m) if turned else (m, columns))

    def products(self) -> Iterator[tuple[int, int, int, int]]:
        """For the planner: (m, n, k, count) of the products [m, k] x [k, n] of a call."""
        for count, k, side in self._sizes():
            for m, n, inner in ((k, k, side), (k, k, k), (k, side, k)):
                yield m, n, inner, count * len(self._coefficients)

    def messages(self) -> Iterator[tuple[str, Axis, int]]:
        """For the planner: (collective, axis, bytes) of the messages of a call."""
        if self._mode == "duplicated":
            yield "all_gather", self._axis, 4 * math.prod(self._shape) * self._axis.size
        element = 2 if self._config.muon_fp32_matmul_prec == "medium" else 4
        for count, k, _ in self._sizes() if self._mode == "distributed" else ():
            yield "all_reduce", self._axis, 4 * count
            yield from [("all_reduce", self._axis, element * count * k * k)] * len(self._coefficients)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The scaled update of this rank's part, from the momentum of that part."""
        if self._mode != "duplicated":
            return self._each(x)
        parts = list(all_gather(x[None], self._axis).unbind(0))
        return self._layout.take(self._each(self._layout.join(parts)))

    def _each(self, x: torch.Tensor) -> torch.Tensor:
        """Orthogonalize q, k and v of a fused projection separately; its rows are groups of q, k and v."""
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


class Muon(Optimizer):
    """Muon, as in the module docstring.

    Args:
        groups: torch's parameter groups, of matrices.
        updates: for each parameter, the function from its momentum to its update.
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
        """Update all matrices from their gradients."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                direction = p.grad.lerp(average, momentum) if group["nesterov"] else average
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(self._updates[p](direction), alpha=lr)


NamedParams = Sequence[tuple[str, nn.Parameter]]


class LayerWise:
    """Assigns each parameter to one replica (`dist_muon`).

    Args:
        params: (name, parameter), all that are trained.
        mesh: the layout.

    Attributes:
        owned: names of the parameters that this rank updates.
    """

    def __init__(self, params: NamedParams, mesh: Mesh) -> None:
        experts = [(n, p) for n, p in params if layout_of(p).experts is not None]
        dense = [(n, p) for n, p in params if layout_of(p).experts is None]
        self._owners = [(axis, deal(part, axis.size)) for part, axis in ((dense, mesh.dp_cp), (experts, mesh.edp))]
        self.owned = {name for axis, shares in self._owners for name, _ in shares[axis.rank]}

    @torch.no_grad()
    def publish(self) -> None:
        """Broadcast the new weights of each owner to the other replicas."""
        for axis, owner, params in self.messages():
            _send(params, axis, owner)

    def messages(self) -> Iterator[tuple[Axis, int, list[nn.Parameter]]]:
        """(Replicas, owner, weights) of each message."""
        for axis, shares in self._owners:
            for owner, share in enumerate(shares):
                for dtype in dict.fromkeys(p.dtype for _, p in share):
                    yield axis, owner, [p for _, p in share if p.dtype == dtype]


def deal(params: NamedParams, ranks: int) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters that each of `ranks` ranks owns; every rank computes the same."""
    shares: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(ranks)]
    turns = [*range(ranks), *reversed(range(ranks))]
    for number, (name, param) in enumerate(sorted(params, key=lambda item: item[1].numel())):
        shares[turns[number % len(turns)]].append((name, param))
    return shares


def _send(params: list[nn.Parameter], axis: Axis, owner: int) -> None:
    flat = torch.cat([p.detach().flatten() for p in params])
    broadcast(flat, axis, owner)
    for param, values in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.copy_(values.view_as(param))
