"""Activation-aware weight quantisation (AWQ): rescale channels, so that rounding the weights costs less.

The problem in a sentence: the error of a weight is multiplied by its input, a few input channels are ten times as large
as the others, and rounding to 4 bits treats all channels alike.

    y = W x = (W diag(s)) (x / s)          s_j > 1 where channel j of x is large: its weights are rounded more finely

x / s costs nothing: it is folded into what produces x, the gamma of a norm or the rows of a linear layer. The model
computes the same function as before.

| produces x               | consumes x                                  | one s for each                          |
|--------------------------|---------------------------------------------|-----------------------------------------|
| norm before attention    | q, k and v (MLA: down projections)          | channel of h                            |
| MLA: norm of a latent    | the up projection of q, of k and v          | channel of the latent                   |
| rows of v                | the output projection                       | channel of a key head, for its queries  |
| norm before the MLP      | gate and up; of a mixture those of all experts, the router too | channel of h         |
| rows of up               | down, where the MLP is gated (not of routed experts) | channel of f                   |

s = (mean |x|)^alpha. Of `GRID` + 1 values of alpha, 0 to 1, the search takes the one whose quantised products are
nearest to the exact ones on the calibration text; alpha = 0 changes nothing. Since s is folded into the weights, the
stored model is an ordinary one of its family.

Lin et al. 2023 (arXiv 2306.00978), section 3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from minimegatron.errors import ConfigError
from minimegatron.kernels.quantized import Scheme, rounded

GRID = 20  # alpha in 1/20 .. 1
ROWS = 512  # tokens of x that the products are compared on; the mean |x| is over all


@dataclasses.dataclass
class Fold:
    """One place where channels are rescaled.

    Attributes:
        name: for the report.
        site: the module whose input is x.
        weights: [..., o, i], quantised, multiplied by s.
        divide: folds 1 / s [i] into what produces x.
        also: weights multiplied by s that are not quantised.
        heads: (key heads, query heads of each, channels), where query heads of a key head share s.
        seen, total: tokens seen, and the sum of |x| [i] over them.
        rows: sampled tokens of x.
    """

    name: str
    site: nn.Module
    weights: list[torch.Tensor]
    divide: Callable[[torch.Tensor], None]
    also: list[torch.Tensor] = dataclasses.field(default_factory=list)
    heads: tuple[int, int, int] | None = None
    seen: int = 0
    total: torch.Tensor | None = None
    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def see(self, x: torch.Tensor, most: int) -> None:
        """Add the activations [..., i] of a batch, and sample `most` of its tokens."""
        x = x.detach().flatten(0, -2).float()
        self.seen += len(x)
        total = x.abs().sum(0)
        self.total = total if self.total is None else self.total + total
        self.rows.append(x[:: max(1, len(x) // most)][:most].clone())

    def scales(self, alpha: float) -> torch.Tensor:
        """s [i] = (mean |x|)^alpha, normalised so that its smallest and largest value multiply to 1."""
        assert self.total is not None, f"{self.name} has seen no token"
        mean = self.total / self.seen
        if self.heads is not None:
            groups, each, d = self.heads
            mean = mean.view(groups, each, d).mean(1, keepdim=True).expand(groups, each, d).flatten()
        s = mean.pow(alpha).clamp(min=1e-4)
        return s / (s.max() * s.min()).sqrt()

    def error(self, s: torch.Tensor, scheme: Scheme) -> float:
        """Squared error of the quantised products, on the sampled tokens."""
        x = torch.cat(self.rows)
        error = 0.0
        for weight in self.weights:
            for matrix in weight.detach().float().view(-1, *weight.shape[-2:]):
                lost = rounded(matrix * s, scheme) / s - matrix
                error += (x @ lost.t()).square().sum().item()
        return error

    def search(self, scheme: Scheme) -> tuple[torch.Tensor, float, float]:
        """(the best s, its error, the error with s = 1)."""
        best = self.scales(0.0)
        plain = least = self.error(best, scheme)
        for step in range(1, GRID + 1):
            s = self.scales(step / GRID)
            if (error := self.error(s, scheme)) < least:
                best, least = s, error
        return best, least, plain

    def apply(self, s: torch.Tensor) -> None:
        """Fold s into the model."""
        for weight in (*self.weights, *self.also):
            weight.mul_(s.to(weight.dtype))
        self.divide(s)


def _norm(norm: Any) -> Callable[[torch.Tensor], None]:
    """Fold 1 / s into a norm."""

    def divide(s: torch.Tensor) -> None:
        shift = 1.0 if norm.zero_centered else 0.0
        norm.weight.copy_((norm.weight.float() + shift) / s - shift)
        if norm.bias is not None:
            norm.bias.div_(s)

    return divide


def _rows(linear: Any, of: Callable[[torch.Tensor], torch.Tensor], each: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Fold 1 / s into rows of a linear layer.

    Args:
        linear: the layer.
        of: its weight or bias -> a view of these rows.
        each: s -> the shape of the rows.
    """

    def divide(s: torch.Tensor) -> None:
        rows = of(linear.weight)
        rows.div_(each(s).unsqueeze(-1))
        if linear.bias is not None:
            of(linear.bias).div_(each(s))

    return divide


def _attention_folds(name: str, layer: Any) -> Iterable[Fold]:
    attention = layer.self_attention
    first = [
        getattr(attention, part)
        for part in ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
        if hasattr(attention, part)
    ]
    if hasattr(layer.input_layernorm, "weight") and first:
        yield Fold(f"{name} qkv", first[-1], [one.weight for one in first], _norm(layer.input_layernorm))
    for norm, up in (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj")):
        if hasattr(attention, up):
            linear = getattr(attention, up)
            yield Fold(f"{name} {up}", linear, [linear.weight], _norm(getattr(attention, norm)))
    if hasattr(attention, "linear_qkv"):
        qkv, d, each = attention.linear_qkv, attention.d, attention.per_group
        rows = sum(attention.of_group)
        groups = len(qkv.weight) // (rows * d)
        divide = _rows(
            qkv,
            lambda tensor: tensor.view(groups, rows, d, *tensor.shape[1:])[:, -1],
            lambda s: s.view(groups, each, d)[:, 0],
        )
        proj = attention.linear_proj
        yield Fold(f"{name} proj", proj, [proj.weight], divide, heads=(groups, each, d))


def _mlp_folds(name: str, layer: Any, gated: bool) -> Iterable[Fold]:
    mlp = layer.mlp
    experts = getattr(mlp, "experts", None)
    dense = mlp if experts is None else mlp.shared_experts
    weights = [] if experts is None else [experts.weight1]
    also = [] if experts is None else [mlp.router.weight]
    if dense is not None:
        weights.append(dense.linear_fc1.weight)
        gate = getattr(dense, "gate_weight", None)
        also += [] if gate is None else [gate]
    if hasattr(layer.pre_mlp_layernorm, "weight"):
        site = mlp.linear_fc1 if experts is None else mlp
        yield Fold(f"{name} fc1", site, weights, _norm(layer.pre_mlp_layernorm), also)
    if dense is not None and gated:
        fc1, fc2 = dense.linear_fc1, dense.linear_fc2
        divide = _rows(fc1, lambda tensor: tensor.chunk(2)[1], lambda s: s)
        yield Fold(f"{name} fc2", fc2, [fc2.weight], divide)


def folds_of(model: Any) -> list[Fold]:
    """All places of a model where channels can be rescaled.

    Raises:
        ConfigError: tp, pp or ep is above 1.
    """
    if any(axis.size > 1 for axis in (model.mesh.tp, model.mesh.pp, model.mesh.ep)):
        raise ConfigError("scales are searched for on one rank", fix="without torchrun")
    found: list[Fold] = []
    for number, layer in model.layers.items():
        found += _attention_folds(f"layer {number}", layer)
        found += _mlp_folds(f"layer {number}", layer, model.config.gated_linear_unit)
    return found


@torch.no_grad()
def scale_by_activations(model: Any, tokens: torch.Tensor, scheme: Scheme) -> list[tuple[str, float, float]]:
    """Rescale a model in place, so that quantising it changes its products less.

    Args:
        model: on one rank, in eval mode; it computes the same function afterwards, up to rounding.
        tokens: [n, s], the calibration text.
        scheme: that its weights will be quantised by.

    Returns:
        For each place (name, squared error of its quantised products, the same without rescaling).

    Raises:
        ConfigError: tp, pp or ep is above 1.
    """
    folds = folds_of(model)
    most = max(1, ROWS // len(tokens))
    hooks = [
        fold.site.register_forward_pre_hook(lambda module, args, fold=fold: fold.see(args[0], most)) for fold in folds
    ]
    try:
        for row in tokens:
            model(row[None].to(model.mesh.device))
    finally:
        for hook in hooks:
            hook.remove()
    report = []
    for fold in folds:
        s, error, plain = fold.search(scheme)
        fold.apply(s)
        fold.rows.clear()
        report.append((fold.name, error, plain))
    return report
