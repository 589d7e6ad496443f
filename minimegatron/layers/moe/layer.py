"""A mixture of E experts in place of the MLP; each token passes k of them.

The problem in a sentence: in an MLP the work of a token grows with the parameters; E experts have E times the
parameters of one, and the work of k.

    y_x = sum over the k experts e of token x:  p_xe  fc2_e( act( fc1_e(x) ) )        + shared(x)

| stage     | shapes                                        | sent                               |
|-----------|-----------------------------------------------|------------------------------------|
| route     | x [T, h] -> probs, map [T, E]                 | E counts for the balancing loss    |
| dispatch  | -> rows [n, h] sorted by expert               | tokens (`layers/moe/dispatch`)     |
| experts   | [n, h] -> [n, h]; etp: partial sums over f    | nothing                            |
| combine   | -> [T, h]                                     | tokens                             |

T = s b / (t c) are the tokens of this rank: experts take their ranks from tp x cp x dp, and every one of these has
other tokens (with tp > 1 only under sequence parallelism, which is therefore required).

**Weights** are stacked: fc1 [E, f, h] (gated [E, 2f, h]) and fc2 [E, h, f], with `add_bias_linear` their biases. A rank
of ep holds E/P experts, each cut over etp as an MLP is over tp. p multiplies the input of fc2, and fc2's bias, so the
rows that travel back are finished, and the gradient of p needs no message. etp sums parts of fc2's output: its first
rank alone adds the bias (`partial="experts"`).

**Products**: the loop multiplies each expert's rows by its matrix; the activation between is one operator for all rows.
`moe_grouped_gemm` does the products of all experts in one call (`torch.nn.functional.grouped_mm`).

**The gradient of an expert** is a sum over the tokens of all ranks that it serves. The all-to-all's backward pass has
brought those of its ep group; those of the ranks that hold the same expert are summed over edp. One division by the
tokens of the whole batch follows, so there is no factor of ep, edp or dp.

**Shared experts** are an MLP that all tokens pass; with a gate, times sigmoid(x w). With `moe_shared_expert_overlap` it
is computed while the tokens are sent.

Shazeer et al. 2017 (arXiv 1701.06538); Dai et al. 2024 (arXiv 2401.06066). Megatron-LM:
`megatron/core/transformer/moe/moe_layer.py`, `experts.py`, `shared_experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.axis import ALONE, Axis
from minimegatron.comm.random import RngStreams
from minimegatron.config.model import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.mlp import MLP, activation_of
from minimegatron.layers.moe import balance  # noqa: F401  (its step hook)
from minimegatron.layers.moe.dispatch import DISPATCHERS, Dispatched, Dispatcher, experts_here
from minimegatron.layers.moe.router import TopKRouter
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GROUPED_MM = getattr(F, "grouped_mm", None)  # torch 2.10 and later


class Experts(nn.Module):
    """The experts of this rank.

    Args:
        config: sizes, activation.
        mesh: its `ep` shares the experts, its `etp` each of them.

    Raises:
        ConfigError: f cannot be cut over etp, or torch has no grouped product.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.gated = config.gated_linear_unit
        self.activation = activation_of(config)
        self.grouped = config.moe_grouped_gemm
        if self.grouped and GROUPED_MM is None:
            raise ConfigError(
                f"moe_grouped_gemm: torch {torch.__version__} has no grouped_mm", fix="torch 2.10, or drop it"
            )
        e, h, f, etp = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size, mesh.etp
        here, halves = experts_here(e, mesh.ep), 2 if self.gated else 1
        fc1 = cut_evenly(halves * f, etp, f"fc1 of an expert of {f}", halves)
        fc2 = cut_evenly(f, etp, f"fc2 of an expert of {f}")
        std1, std2 = Init(std=config.init_method_std), Init(std=config.output_init_std)
        layout1 = ParamLayout((e, halves * f, h), 1, fc1, etp.rank, std1, experts=here)
        layout2 = ParamLayout((e, h, f), 2, fc2, etp.rank, std2, experts=here)
        self.weight1, self.weight2 = new_parameter(layout1, config.dtype), new_parameter(layout2, config.dtype)
        self.bias1: nn.Parameter | None = None
        self.bias2: nn.Parameter | None = None
        if config.add_bias_linear:
            whole = ParamLayout((e, h), experts=here, partial="experts")
            self.bias1 = new_parameter(ParamLayout((e, halves * f), 1, fc1, etp.rank, experts=here), config.dtype)
            self.bias2 = new_parameter(whole, config.dtype)
        self.etp = etp
        self.lora1: Any = None  # `layers/lora.ExpertLora`
        self.lora2: Any = None
        self.here = here
        self.number = e
        self.fp8: nn.ModuleDict | None = None  # number of an expert -> what computes its fc1 and fc2

    def forward(self, sent: Dispatched) -> torch.Tensor:
        """The dispatched rows [n, h] -> [n, h]; with etp > 1 this rank's part of a sum."""
        weight1, weight2 = self.weights()
        fc1: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        fc2: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        if self.grouped:
            fc1 = fc2 = partial(_grouped, ends=sent.ends())
        else:
            each = [self._products(i, n) for i, n in enumerate(sent.counts)]
            fc1, fc2 = (partial(_product, products, counts=sent.counts) for products in zip(*each, strict=True))
        y, rows = fc1(sent.rows, weight1), partial(_rows, counts=sent.counts)
        y = self.activation(y if self.bias1 is None else y + rows(self.bias1))
        y = fc2((y * sent.probs[:, None]).to(y.dtype), weight2)  # times the weight of the expert for the token
        if self.bias2 is None or self.etp.rank > 0:
            return y
        return y + (rows(self.bias2) * sent.probs[:, None]).to(y.dtype)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both stacks, with the products of their adapters added: an expert's few rows cost less than its matrices."""
        if self.lora1 is None:
            return self.weight1, self.weight2
        return self.weight1 + self.lora1.product(), self.weight2 + self.lora2.product()

    def _products(self, expert: int, rows: int) -> tuple[Product, Product]:
        """The functions that compute the two products of an expert; for no rows the plain ones, as there is nothing to
        quantise."""
        if self.fp8 is None or rows == 0:
            return F.linear, F.linear
        both: Any = self.fp8[str(self.here[0] + expert)]
        return both[0].linear, both[1].linear

    def amax_axes(self) -> tuple[dict[str, Axis], dict[str, Axis]]:
        """input, weight, gradient -> ranks that hold parts of it, for fc1 and for fc2 (`layers/fp8/linear`)."""
        return (
            {"input": ALONE, "weight": self.etp, "gradient": self.etp},
            {"input": self.etp, "weight": self.etp, "gradient": ALONE},
        )


def _rows(biases: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The bias of every row's expert, [E', o] -> [n, o]; its gradient is a sum in the order of the rows."""
    return torch.cat([bias.expand(count, -1) for bias, count in zip(biases.unbind(), counts, strict=True)])


def _product(each: Sequence[Product], x: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Rows of every expert by its matrix, one expert after the other: [n, i], [E', o, i] -> [n, o]."""
    # unbind, and not an index for each: the gradient of an index is a whole stack of zeros and one slice
    parts = zip(each, x.split(counts), weights.unbind(), strict=True)
    return torch.cat([product(rows, w) for product, rows, w in parts])


def _grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of group e times the transpose of `weights[e]`: [n, i], [E', o, i] -> [n, o]."""
    assert GROUPED_MM is not None
    y: torch.Tensor = GROUPED_MM(x, weights.transpose(1, 2), offs=ends)
    if y.requires_grad:  # the backward pass refuses a gradient that has been expanded, such as that of a sum
        y.register_hook(lambda dy: dy.contiguous() if dy.numel() else dy.new_empty(dy.shape))
    return y


class SharedExperts(MLP):
    """The MLP that every token passes.

    Args:
        config: its size; with `moe_shared_expert_gate` a gate [1, h], replicated, while each rank has its own tokens.
        mesh: its layout.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh, config.moe_shared_expert_intermediate_size)
        self.gate_weight: nn.Parameter | None = None
        if config.moe_shared_expert_gate:
            layout = ParamLayout((1, config.hidden_size), init=Init(std=config.init_method_std), partial="sequence")
            self.gate_weight = new_parameter(layout, config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s', b, h] -> [s', b, h], for the tokens of this rank."""
        y = super().forward(x)
        return y if self.gate_weight is None else y * F.linear(x, self.gate_weight).sigmoid()


class MoELayer(nn.Module):
    """Router, dispatcher, experts, and shared experts if the model has them.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number from 0.
        rng: streams for the router's jitter.

    Raises:
        ConfigError: the experts do not fit the layout.
    """

    def __init__(
        self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: RngStreams | None = None
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.overlap = config.moe_shared_expert_overlap
        self.router = TopKRouter(config, mesh, layer_number, rng)
        self.dispatcher: Dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](config, mesh)
        self.experts = Experts(config, mesh)
        size = config.moe_shared_expert_intermediate_size
        self.shared_experts = None if size is None else SharedExperts(config, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s', b, h] -> [s', b, h], for the tokens of this rank."""
        arrive = self.dispatcher.dispatch(x.flatten(0, 1), self.router(x))
        shared = self._shared(x) if self.overlap else None
        sent = arrive()
        y = sent.back(self.experts(sent)).view_as(x)
        shared = shared if self.overlap else self._shared(x)
        return y if shared is None else y + shared

    @property
    def reads_device(self) -> str:
        """Why a pass can be neither recorded nor compiled as a whole (`inference/runner`)."""
        return f"the host must know how many tokens each of its {self.config.num_experts} experts has got"

    def check_generation(self) -> None:
        """Refuse to generate if a sequence would depend on the others of its batch (`inference/engine`).

        Raises:
            ConfigError: experts have a capacity.
        """
        if self.config.moe_expert_capacity_factor is not None:
            raise ConfigError(
                f"generation with moe_expert_capacity_factor {self.config.moe_expert_capacity_factor}: padding and "
                "neighbours would push tokens out of their experts",
                fix="moe_expert_capacity_factor=None: no token is dropped",
            )

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.shared_experts is None else self.shared_experts(x)
