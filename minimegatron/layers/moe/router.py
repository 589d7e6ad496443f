"""The router: which k experts each token goes to, with which weights, and how the load is kept even.

    logits = x W^T (+ b)               [T, E], in fp32 whatever the model computes in
    softmax   weights = softmax(the k largest logits); pre-softmax: the k largest of softmax(logits)
    sigmoid   s = sigmoid(logits);  choose by s + bias;  weights = s of the chosen / their sum
    groups    choose among the experts of the `group_topk` best groups; a group's worth is the sum of its best
              k / group_topk experts
    capacity  an expert takes at most C = ceil(T k / E * factor) of a rank's tokens and drops the lightest (or last)

Nothing in the loss of a language model prevents all tokens from choosing the same expert. Four ways to an even load; T
tokens, p_xe the normalised scores, n_e how many tokens chose e:

| way             | what is added                                                       | statistics over             |
|-----------------|---------------------------------------------------------------------|-----------------------------|
| auxiliary loss  | coeff E / (k T^2) sum_e (sum_x p_xe) n_e; its optimum is coeff      | microbatch, sequence, batch |
| z-loss          | coeff mean_x logsumexp(logits_x)^2: logits stay small               | none                        |
| expert bias     | no loss: bias_e moves by +-rate after each step (`balance`)         | all tokens of the step      |
| Sinkhorn        | no loss: tokens are assigned (`sinkhorn`)                           | microbatch                  |

**Communication**: the auxiliary loss all-reduces E counts, over tp_cp or, for the batch, tp_dp_cp. Only p has a
gradient, and the loss is linear in it, so each rank computes the loss of its own tokens with the shares of all ranks,
and the gradients of the ranks add up.

**Scale**: the gradients of a step are sums over tokens, divided once by their number. So each loss enters as its mean
times the tokens of that mean, and the result does not depend on how tokens are cut over tp, cp, dp and microbatches.
`_Attach` adds its gradient where the weights leave the router, times `loss_scale`. It also counts the statistics: its
backward pass runs once a microbatch, also under recompute, and never in an evaluation.

The router is replicated over tp and sees only its rank's tokens, so its gradient is partial like that of a norm.

Shazeer et al. 2017 (arXiv 1701.06538); Fedus et al. 2021 (arXiv 2101.03961); Zoph et al. 2022 (arXiv 2202.08906);
DeepSeek-V3 (arXiv 2412.19437); Wang et al. 2024 (arXiv 2408.15664). Megatron-LM: `transformer/moe/router.py`,
`moe_utils.py`.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.random import RngStreams
from minimegatron.config.model import TransformerConfig
from minimegatron.layers.param import Init, ParamLayout, new_parameter
from minimegatron.layers.recompute import numbers_of

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh


class Routing(NamedTuple):
    """The routing of T tokens.

    Attributes:
        probs: [T, E] weight of each expert for each token, 0 for experts that the token does not go to.
        map: [T, E] bool; which tokens an expert gets. Padding may be among them, with weight 0.
    """

    probs: torch.Tensor
    map: torch.Tensor


class TopKRouter(nn.Module):
    """The router, as in the module docstring.

    Args:
        config: number of experts, the choice, the penalties.
        mesh: its axes share a microbatch's tokens.
        layer_number: global number from 0, for reports.
        rng: streams for the jitter.

    Attributes:
        expert_bias: [E] in fp32, updated by `layers/moe/balance`; None without.
        loss_scale: factor of the loss of the next backward pass.
        tally: [`tally_size`] in fp64, since the last `reset`: how many tokens chose each expert, how many were
            dropped, how many tokens there were, and summed over them each balancing loss (0 without) and the z-loss.
        microbatches: how many have been counted in it.
    """

    tally: torch.Tensor

    def __init__(
        self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: RngStreams | None = None
    ) -> None:
        super().__init__()
        assert config.num_experts is not None, "a router needs experts"
        self.config = config
        self.mesh = mesh
        self.layer_number = layer_number
        self.rng = rng
        self.num_experts, self.k = config.num_experts, config.moe_router_topk
        self.dtype = torch.float64 if config.moe_router_dtype == "fp64" else torch.float32
        layout = ParamLayout(
            (self.num_experts, config.hidden_size), init=Init(std=config.init_method_std), partial="sequence"
        )
        self.weight = new_parameter(layout, config.dtype)
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:
            self.bias = new_parameter(ParamLayout((self.num_experts,), partial="sequence"), config.dtype)
        self.expert_bias: nn.Parameter | None = None
        if config.moe_router_enable_expert_bias:  # no gradient moves it, but it belongs to the weights
            self.expert_bias = new_parameter(ParamLayout((self.num_experts,)), torch.float32)
            self.expert_bias.requires_grad_(False)
        self.loss_scale, self.microbatches = 1.0, 0
        tally = torch.zeros(tally_size(config), dtype=torch.float64, device="cpu")
        self.register_buffer("tally", tally, persistent=False)

    def forward(self, x: torch.Tensor) -> Routing:
        """x [s', b, h] -> the routing of its T = s' b tokens, in the router's dtype."""
        dtype = torch.promote_types(x.dtype, self.dtype)
        tokens = self._jitter(x).flatten(0, 1).to(dtype)
        logits = F.linear(tokens, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        if self.config.moe_router_load_balancing_type == "sinkhorn":
            weights, chosen = assign(logits, self.k, self.mesh.tp_cp if self.training else None)
        else:
            weights, chosen = choose(logits, self.config, self.expert_bias)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights)
        wanted = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        routing = Routing(probs, wanted)
        if self.config.moe_expert_capacity_factor is not None:
            routing = limit(routing, capacity(len(tokens), self.config), self.config)
        if not (self.training and torch.is_grad_enabled()):
            return routing
        penalties = self._penalties(logits, x.shape[1])
        requests = wanted.sum(0)
        limited = self.config.moe_expert_capacity_factor is not None
        dropped = (wanted & ~routing.map).sum().reshape(1) if limited else requests.new_zeros(1)
        counts = torch.cat([requests, dropped, requests.new_full((1,), len(tokens))])
        return routing._replace(probs=_Attach.apply(routing.probs, penalties, counts, self))

    def reset(self) -> None:
        """Zero the statistics, at the end of a step."""
        self.tally.zero_()
        self.microbatches = 0

    def _jitter(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.config.moe_input_jitter_eps
        if eps is None or not self.training:
            return x
        with contextlib.nullcontext() if self.rng is None else self.rng.fork():  # tp ranks have different tokens
            return x * torch.empty_like(x).uniform_(1 - eps, 1 + eps)

    def _penalties(self, logits: torch.Tensor, b: int) -> torch.Tensor:
        """This rank's part of each balancing loss and of the z-loss: its mean times the tokens it is a mean over."""
        config, z = self.config, logits.new_zeros(())
        balance = [z]
        if config.balancing_losses:
            scores, chosen = balance_scores(logits, config)
            balance = [
                weight * balancing_loss(scores, self._shares(chosen, b, kind), self.k)
                for kind, weight in config.balancing_losses
            ]
        if config.moe_z_loss_coeff:
            z = config.moe_z_loss_coeff * logits.logsumexp(-1).square().sum()
        return torch.stack([*balance, z])

    @torch.no_grad()
    def _shares(self, chosen: torch.Tensor, b: int, kind: str) -> torch.Tensor:
        """chosen [T, E] bool -> n_e / T for every token's own set of tokens: [1, E], or [b, E] for sequences."""
        if kind == "seq_aux_loss":
            counts = chosen.unflatten(0, (-1, b)).sum(0).to(torch.float64)  # tokens are in the order [s, b]
        else:
            counts = chosen.sum(0, keepdim=True).to(torch.float64)
        if kind == "global_aux_loss":  # of the microbatches of this step that have been counted, and this
            counts = counts + self.tally[: self.num_experts]
        counts = all_reduce(counts, self.mesh.tp_dp_cp if kind == "global_aux_loss" else self.mesh.tp_cp)
        return self.k * counts / counts.sum(-1, keepdim=True).clamp(min=1.0)  # every token counts k times


class _Attach(torch.autograd.Function):
    """Identity on the weights; its backward pass adds the gradient of the penalties, and counts the statistics."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, penalties: torch.Tensor, counts: torch.Tensor, router: Any) -> Any:
        ctx.router = router
        ctx.save_for_backward(penalties, counts)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        penalties, counts = ctx.saved_tensors
        ctx.router.tally += torch.cat([counts.double(), penalties.double()])
        ctx.router.microbatches += 1
        return grads[0], torch.full_like(penalties, ctx.router.loss_scale), None, None


def tally_size(config: TransformerConfig) -> int:
    """The length of a router's `tally`."""
    assert config.num_experts is not None
    return config.num_experts + 3 + max(1, len(config.balancing_losses))


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Set every router's `loss_scale` before `backward`."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.loss_scale = scale


# ------------------------------------------------------------------------------------------------ the choice


def choose(
    logits: torch.Tensor, config: TransformerConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> (weights [T, k], numbers of the experts [T, k])."""
    k = config.moe_router_topk
    if config.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid()
        chosen = best(scores if bias is None else scores + bias, config)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if k > 1 else weights
    elif config.moe_router_pre_softmax:
        scores = logits.softmax(-1)
        chosen = best(scores, config)
        weights = scores.gather(1, chosen)
    else:
        chosen = best(logits, config)
        weights = logits.gather(1, chosen).softmax(-1)
    factor = config.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor, chosen


@torch.no_grad()
def best(scores: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Numbers of the k best experts [T, k] by `scores` [T, E]; with groups, among the best groups."""
    groups, k = config.moe_router_num_groups, config.moe_router_topk
    if groups is not None and config.moe_router_group_topk is not None:
        kept = config.moe_router_group_topk
        grouped = scores.unflatten(1, (groups, -1))
        worth = grouped.topk(k // kept, -1).values.sum(-1)  # [T, G]
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(kept, -1).indices, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(1)
    return scores.topk(k, -1).indices


# ---------------------------------------------------------------------------------------------- the penalties


def balance_scores(logits: torch.Tensor, config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores that the balancing loss uses: p [T, E], whose rows sum to 1, and the k largest of each row [T, E]
    bool.

    Neither the bias nor groups enter: the loss acts on the router's own scores.
    """
    if config.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        scores = logits.softmax(-1)
    top = scores.detach().topk(config.moe_router_topk, -1).indices
    return scores, torch.zeros_like(scores, dtype=torch.bool).scatter(1, top, True)


def balancing_loss(scores: torch.Tensor, shares: torch.Tensor, k: int) -> torch.Tensor:
    """E/k sum_x sum_e p_xe share_e: each token pays for the experts that it prefers in proportion to their load.

    Args:
        scores: p [T, E].
        shares: n_e / T of the set of tokens that each token is in: [1, E], or [b, E] where token x is in x mod b.
        k: experts of a token.
    """
    paid = scores.unflatten(0, (-1, len(shares))).sum(0) * shares.to(scores.dtype)
    return scores.shape[1] / k * paid.sum()


# ----------------------------------------------------------------------------------------------- the capacity


def capacity(tokens: int, config: TransformerConfig) -> int:
    """C: the most of a rank's `tokens` that an expert takes."""
    assert config.num_experts is not None and config.moe_expert_capacity_factor is not None
    wanted = tokens * config.moe_router_topk / config.num_experts * config.moe_expert_capacity_factor
    return math.ceil(wanted) if wanted < tokens else tokens  # also where the factor is infinite, or no token is here


def limit(routing: Routing, most: int, config: TransformerConfig) -> Routing:
    """Leave every expert at most `most` tokens; exactly that many with padding."""
    by = routing.probs.detach() if config.moe_token_drop_policy == "probs" else routing.map.to(routing.probs.dtype)
    # stable: among equals the first tokens are kept, which topk does not promise
    order = by.argsort(dim=0, descending=True, stable=True)[:most]
    kept = torch.zeros_like(routing.map).scatter(0, order, True)
    if not config.moe_pad_expert_input_to_capacity:
        kept &= routing.map
    return Routing(routing.probs * kept, kept)


# ------------------------------------------------------------------------------------------------------------- sinkhorn

TOLERANCE = 1e-4
SWEEPS = 1024  # far more than it takes; a row of NaN ends it at once
LOOK = 4
TINY = 1e-8


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, axis: Axis, tol: float = TOLERANCE) -> torch.Tensor:
    """The assignment of tokens to experts with equal loads, nearly optimal: S-BASE.

    ::

        C = exp(logits)  [T, E]     find r [T], c [E] so that S = diag(r) C diag(c) has rows that sum to 1/T (every
                                    token is assigned once) and columns that sum to 1/E (all experts get as much)
        repeat  r = 1 / (T C c);  c = 1 / (E C^T r)      until c moves by less than `tol` on average

    A token goes to the k largest of its row of S; the choice has no gradient, the weights come from the logits. S
    balances amounts and a token takes whole experts, so loads are only nearly even. Every row of C is divided by its
    largest element first, which r takes up, so that nothing overflows.

    Communication: one all-reduce of 8 E bytes a sweep. A microbatch is one assignment, whatever ranks share its tokens,
    so the routing does not depend on the layout; in Megatron-LM each rank assigns its own tokens.

    The host looks whether it is done after 4, 8, 16 ... sweeps, because each look waits for the device. Factors that
    had stopped moving by then are left as they were, so the result is that of a look after every sweep.

    Sinkhorn & Knopp 1967; Clark et al. 2022 (arXiv 2202.01169). Megatron-LM: `sinkhorn` in `moe_utils.py`.

    Args:
        logits: [T, E] of this rank.
        axis: who shares the microbatch.
        tol: mean change of an expert's factor at which the sweeps end.

    Returns:
        This rank's rows [T, E], in fp64.
    """
    tokens, experts = len(logits) * axis.size, logits.shape[1]
    wide = logits.double()
    c = (wide - wide.amax(1, keepdim=True)).exp()
    columns, rows = c.new_ones(experts), c.new_empty(len(c))
    moving = torch.ones((), dtype=torch.bool, device=c.device)
    for sweep in range(1, SWEEPS + 1):
        new_rows = 1 / (tokens * ((c @ columns) + TINY))
        new = 1 / (experts * (all_reduce(new_rows @ c, axis) + TINY))
        far = (new - columns).abs().mean() > tol
        rows, columns = torch.where(moving, new_rows, rows), torch.where(moving, new, columns)
        moving = moving & far
        if sweep >= LOOK and sweep & (sweep - 1) == 0 and not numbers_of(moving, list):
            break
    return rows[:, None] * c * columns


def assign(logits: torch.Tensor, k: int, axis: Axis | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sinkhorn routing: logits [T, E] -> (weights [T, k], numbers of the experts [T, k]).

    Args:
        logits: of this rank's tokens.
        k: experts of a token.
        axis: the ranks that share the microbatch; None where tokens choose for themselves (evaluation).
    """
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    by = scores.detach() if axis is None else sinkhorn(logits, axis)
    chosen = by.topk(k, -1).indices
    return scores.gather(1, chosen), chosen
