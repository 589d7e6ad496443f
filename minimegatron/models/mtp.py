"""Multi-token prediction: a model that is also asked for the token after the next.

The problem in a sentence: a hidden state is trained on one token ahead only; trained on D more it learns to plan, and
the layers that predict them can later draft tokens for speculative decoding.

Depth k has one more transformer layer. It sees the state of depth k - 1 and the token that depth predicts:

    h_i^k = layer_k( M_k [ norm(Emb(t_{i+k})) ; norm(h_i^{k-1}) ] )       k = 1 .. D,  h^0 is the model's output
    loss_i^k = cross entropy of t_{i+k+1}, by norm(h_i^k) and the model's own output layer
    total    = sum_i m_i loss_i  +  lambda / D  sum_k sum_i m_{i+k} loss_i^k

In generation depth k proposes the token k places after the next (`inference/speculative`).

m_{i+k} is the mask of the token where t_{i+k+1} is the label. Embedding and output layer are the model's; with
w_i the labels, t_{i+k} = w_{i+k-1}: all inputs are the labels rolled to the left.

**Two losses, one result.** The model returns the losses of the next token, and its caller masks, sums and scales them.
The other depths' losses are attached to them (`_AddLosses`): identity on the losses, whose backward pass receives
dL/dloss_i, which *is* mask and scale; rolled by k and times lambda / D it is the gradient of loss^k. So mask and scale
are given once, and the result does not depend on how the batch is cut. The same backward pass counts
sum_i m_{i+k} loss_i^k for the log (`depth_losses`): once a microbatch, whatever is recomputed, and never in an
evaluation, which runs no depth at all.

**Rolls.** What is rolled past the end of the sequence, or into another document, has gradient 0. With context
parallelism a token's neighbour is on another rank: ids and gradients [b, s], small beside activations, are gathered,
rolled, and cut again.

**In a pipeline** all depths are on the last stage, in every schedule. Labels are there; the embedding is a copy, whose
gradient is added to the first stage's (`models/chunks`).

M_k [h, 2h] is replicated over tp and acts on the tokens that a rank holds; its gradient is partial like that of a norm.

**In generation** row j of depth k is what is made of token t_j, that is of place i = j - k: its key and value, and the
state h_{j-k}^k that depth k + 1 reads in row j + 1. So a row of a page depends on the tokens up to its own and on none
behind it, as it does for the model's layers: tables, forks, copies and prefix reuse serve all depths. Depth k has no
row before k, which `InferenceContext.without_first` leaves out.

The halves of M_k stand as in DeepSeek's published weights and in Megatron, the embedding first; the paper has them the
other way round. The total is what Megatron computes with `--calculate-per-token-loss`.

DeepSeek-V3 (arXiv 2412.19437) section 2.2; Gloeckle et al. 2024 (arXiv 2404.19737). Megatron-LM:
`megatron/core/transformer/multi_token_prediction.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.comm.sequence import gather_tokens, local_tokens
from minimegatron.config.model import TransformerConfig
from minimegatron.layers.attention.mla import ReplicatedLinear
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.inference_context import InferenceContext, LayerState, StateSpec
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init
from minimegatron.layers.recompute import recompute_module
from minimegatron.layers.step_hooks import StepHook, step_hook
from minimegatron.models.spec import ModuleSpec, build_module


class PredictionLayer(nn.Module):
    """One depth: two norms, the projection, a transformer layer, a norm.

    Args:
        config: the model.
        mesh: its layout.
        spec: of the transformer layer.
        layer_number: its global number; depths follow the model's layers.
        rng: dropout streams.
    """

    def __init__(
        self, config: TransformerConfig, mesh: Mesh, spec: ModuleSpec, layer_number: int, rng: RngStreams | None
    ) -> None:
        super().__init__()
        h = config.hidden_size
        self.layer_number = layer_number
        self.enorm, self.hnorm = Norm(config), Norm(config)
        self.eh_proj = ReplicatedLinear(2 * h, h, Init(std=config.init_method_std), config.dtype)
        self.transformer_layer: Any = build_module(spec, config, mesh, layer_number, rng)
        self.final_layernorm = Norm(config)
        # with the method "block" only the first layers of the model are recomputed, and these are behind the last
        if config.recompute_granularity == "full" and config.recompute_method == "uniform":
            recompute_module(self, rng)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """The state of the depth before and the tokens' embeddings [s', b, h] -> this depth's state [s', b, h]."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return self.final_layernorm(self.transformer_layer(x, context))

    def inference_state(self) -> dict[str, StateSpec]:
        """What its layer keeps of a token; and "hidden", the state that it reads for the next one."""
        kept: dict[str, StateSpec] = self.transformer_layer.inference_state()  # type: ignore[operator]
        kept = {name: dataclasses.replace(spec, by_head=False) for name, spec in kept.items()}  # for `without_first`
        return {**kept, "hidden": StateSpec((self.hnorm.weight.shape[0],))}


class MultiTokenPrediction(nn.Module):
    """All depths. Their embedding and output layer are the model's and come as functions.

    Args:
        config: the model.
        mesh: its layout.
        spec: of a transformer layer.
        rng: dropout streams.

    Attributes:
        tally: [D, 2] in fp64, since it was last taken: for each depth the loss summed over the tokens that counted, and
            their number, both times what the loss was multiplied by.
    """

    tally: torch.Tensor

    def __init__(self, config: TransformerConfig, mesh: Mesh, spec: ModuleSpec, rng: RngStreams | None = None) -> None:
        super().__init__()
        assert config.mtp_num_layers, "the config has no depths"
        self.mesh, self.factor = mesh, config.mtp_loss_scaling_factor / config.mtp_num_layers
        first = config.num_layers
        self.layers: Any = nn.ModuleList(
            PredictionLayer(config, mesh, spec, first + k, rng) for k in range(config.mtp_num_layers)
        )
        tally = torch.zeros(config.mtp_num_layers, 2, dtype=torch.float64, device="cpu")
        self.register_buffer("tally", tally, persistent=False)

    def forward(
        self,
        losses: torch.Tensor,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        context: AttentionContext,
        embed: Callable[[torch.Tensor, int], torch.Tensor],
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Add the losses of all depths to the training, through the gradient of `losses`.

        Args:
            losses: [b, s] of the next token.
            hidden: [s', b, h], the model's output.
            labels: [b, s].
            context: the batch's angles and mask.
            embed: (ids [b, s] of the tokens k places further, k) -> [s', b, h].
            loss_of: (hidden [s', b, h], labels [b, s]) -> losses [b, s].

        Returns:
            `losses`, unchanged.
        """
        deeper = []
        for k, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, embed(self.rolled(labels, k - 1), k), context)
            deeper.append(loss_of(hidden, self.rolled(labels, k)))
        return _AddLosses.apply(losses, self, context.mask.document_ids, *deeper)  # type: ignore[no-any-return]

    def inference_state(self) -> dict[int, dict[str, StateSpec]]:
        """Layer number of each depth -> what it keeps of a token in generation."""
        return {layer.layer_number: layer.inference_state() for layer in self.layers}

    def keep(self, hidden: torch.Tensor, depth: int, context: InferenceContext) -> None:
        """Keep the state [s', 1, h] of a depth, 0 for the model's, where there is a next one that takes part."""
        if depth < len(self.layers) and (number := self.layers[depth].layer_number) in context.state:
            if self.mesh.sequence_parallel:
                hidden = c.gather_from_sequence_region(hidden, self.mesh.tp)
            LayerState(context, number).write_tokens(hidden=hidden)

    def state_before(self, depth: int, before: torch.Tensor, context: InferenceContext) -> torch.Tensor:
        """What a depth reads for new tokens, [s', 1, h], of the rows `before` [n] them."""
        pages = LayerState(context, self.layers[depth - 1].layer_number).pages("hidden")
        hidden = pages.flatten(0, 1)[before].unsqueeze(1)
        return c.scatter_to_sequence_region(hidden, self.mesh.tp) if self.mesh.sequence_parallel else hidden

    def rolled(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """x_{i+k} for every token i that is here, [b, s] -> [b, s]; the first ones again past the end."""
        if k == 0:
            return x
        return local_tokens(gather_tokens(x, self.mesh, 1).roll(-k, 1), self.mesh, 1)

    def weights(self, grad: torch.Tensor, k: int, document_ids: torch.Tensor | None) -> torch.Tensor:
        """What depth k's losses count [b, s], before lambda / D, from the gradient of the next token's losses."""
        rolled = gather_tokens(grad, self.mesh, 1).roll(-k, 1)
        rolled[:, -k:] = 0.0
        if document_ids is not None:
            rolled = rolled * (document_ids == document_ids.roll(-k, 1))
        return local_tokens(rolled, self.mesh, 1)


class _AddLosses(torch.autograd.Function):
    """Identity on the losses; gives those of the other depths their share of its gradient."""

    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor, block: Any, document_ids: Any, *deeper: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.document_ids = block, document_ids
        ctx.save_for_backward(*deeper)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        block, shares = ctx.block, []
        for k, losses in enumerate(ctx.saved_tensors, 1):
            weights = block.weights(grads[0].contiguous(), k, ctx.document_ids)
            block.tally[k - 1] += torch.stack([(weights * losses).sum().double(), weights.sum(dtype=torch.float64)])
            shares.append(block.factor * weights)
        return grads[0], None, None, *shares


def depth_losses(model: nn.Module, scale: float) -> dict[str, torch.Tensor]:
    """What this rank's depths have counted since the last call: Megatron's name -> [sum of losses, tokens], in fp64.

    Args:
        model: what this rank holds; {} where it has no depths.
        scale: what the loss was multiplied by before its backward pass.
    """
    found: dict[str, torch.Tensor] = {}
    for block in model.modules():
        if isinstance(block, MultiTokenPrediction):
            found = {f"mtp_{k} loss": pair / scale for k, pair in enumerate(block.tally.clone(), 1)}
            block.tally.zero_()
    return found


@step_hook
class DepthLosses(StepHook):
    """Reports the depths' losses in every step."""

    def begin_step(self, scale: float) -> None:
        self.scale = scale

    def reports(self) -> dict[str, torch.Tensor]:
        return depth_losses(self.model, self.scale)
