"""Fields of a mixture of experts, and the rules between them.

`TransformerConfig` (config/model.py) inherits them. `num_experts` turns them on; `layers/moe/router`,
`layers/moe/dispatch` and `layers/moe/layer` say what they do.

Megatron-LM: `TransformerConfig` in `megatron/core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import dataclasses
import re

from minimegatron.config.fields import HOW, MODEL, RUN, TRAINED, Config, divides, opt
from minimegatron.errors import ConfigError, require

# The balancing losses, and what Megatron calls each in its log.
BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_FREQUENCY = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


@dataclasses.dataclass(frozen=True)
class ExpertFields(Config):
    """A mixture of experts in place of the MLP. `E` num_experts, `k` moe_router_topk."""

    num_experts: int | None = opt(MODEL, None, "E, experts of a layer; None for a model without", least=1)
    moe_layer_freq: str = opt(
        MODEL, "1", "n: every n-th layer has experts, from the first; or all layers: ([0]*3+[1]*58)"
    )
    moe_ffn_hidden_size: int = opt(MODEL, None, "inner width of one expert; default f", least=1)
    moe_shared_expert_intermediate_size: int | None = opt(
        MODEL, None, "inner width of an MLP that every token also passes", least=1
    )
    moe_shared_expert_gate: bool = opt(MODEL, False, "its output times a sigmoid of the token (Qwen2-MoE)")
    moe_shared_expert_overlap: bool = opt(HOW, False, "compute the shared expert while tokens travel (alltoall)")
    moe_router_topk: int = opt(MODEL, 2, "k, experts of a token", least=1)
    moe_router_score_function: str = opt(MODEL, "softmax", "what makes scores of logits", ("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = opt(
        MODEL, False, "softmax over all experts, then the k largest; default the other order"
    )
    moe_router_topk_scaling_factor: float | None = opt(
        MODEL, None, "the weights of a token's experts times this", above=0.0
    )
    moe_router_num_groups: int | None = opt(MODEL, None, "groups of experts, of which a token may use some", least=1)
    moe_router_group_topk: int | None = opt(MODEL, None, "how many of the groups", least=1)
    moe_router_enable_expert_bias: bool = opt(
        MODEL, False, "balance by a bias on the scores instead of a loss (sigmoid)"
    )
    moe_router_bias_update_rate: float = opt(RUN, 1e-3, "how much that bias moves in a step", least=0.0)
    moe_router_dtype: str = opt(TRAINED, "fp32", "dtype in which logits and scores are computed", ("fp32", "fp64"))
    moe_input_jitter_eps: float | None = opt(
        RUN, None, "the router's input times a random number in [1 - eps, 1 + eps]", above=0.0, below=1.0
    )
    moe_router_load_balancing_type: str | tuple[str, ...] = opt(
        TRAINED,
        "aux_loss",
        "over which tokens the balancing loss counts: a microbatch, each sequence, the batch so far, or several of "
        "these; or no such loss: an even assignment, or nothing",
        (*BALANCING, "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: float | tuple[float, ...] = opt(
        RUN, 0.0, "weight of the balancing loss, 1e-2 is usual; with several of them a weight for each"
    )
    moe_z_loss_coeff: float | None = opt(RUN, None, "weight of the loss on large logits; 1e-3 is usual", least=0.0)
    moe_expert_capacity_factor: float | None = opt(
        TRAINED,
        None,
        "an expert takes at most this times k T / E of a rank's T tokens; None for all that want it",
        least=0.0,
    )
    moe_pad_expert_input_to_capacity: bool = opt(TRAINED, False, "every expert takes exactly its capacity, padded")
    moe_token_drop_policy: str = opt(TRAINED, "probs", "who is kept: the heaviest, or the first", ("probs", "position"))
    moe_token_dispatcher_type: str = opt(HOW, "allgather", "how tokens reach their experts", ("allgather", "alltoall"))
    moe_grouped_gemm: bool = opt(
        HOW, False, "all experts of a rank in one matrix product, instead of one after the other"
    )

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """For every layer of the model whether it has experts."""
        layers: int = self.num_layers  # type: ignore[attr-defined]
        pattern: str | None = self.hybrid_override_pattern  # type: ignore[attr-defined]
        if self.num_experts is None:
            return (False,) * layers
        if pattern is not None:
            return tuple(symbol == "E" for symbol in pattern)
        return layer_pattern(self.moe_layer_freq, layers)

    @property
    def layers_with_experts(self) -> list[int]:
        """Numbers of the layers with experts, multi-token prediction included."""
        depth: int = self.num_layers + (self.mtp_num_layers or 0)  # type: ignore[attr-defined]
        return [n for n in range(depth) if self.has_experts(n)]

    def has_experts(self, layer_number: int) -> bool:
        """Whether layer `layer_number` (from 0) has experts in place of its MLP."""
        pattern = self.expert_layers
        return pattern[min(layer_number, len(pattern) - 1)]  # what follows the last layer is like it

    @property
    def balancing_losses(self) -> tuple[tuple[str, float], ...]:
        """(type, weight) of every balancing loss whose weight is not 0."""
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        weights = weights if isinstance(weights, tuple) else (weights,)
        return tuple((kind, float(w)) for kind, w in zip(kinds, weights, strict=True) if kind in BALANCING and w)

    def _check_experts(self, ffn_hidden_size: int) -> None:
        self._derive(moe_ffn_hidden_size=ffn_hidden_size)
        if self.num_experts is None:
            given = [f.name for f in dataclasses.fields(ExpertFields) if getattr(self, f.name) != f.default]
            given = [name for name in given if name != "moe_ffn_hidden_size"]
            require(not given, f"{', '.join(given)} in a model without experts", "give num_experts, or drop them")
            return
        experts, k = self.num_experts, self.moe_router_topk
        require(k <= experts, f"moe_router_topk ({k}) of num_experts ({experts})", f"choose 1 to {experts}")
        require(
            any(self.expert_layers),
            f"num_experts={experts}, and moe_layer_freq={self.moe_layer_freq!r} gives no layer experts",
            "drop num_experts, or give a layer a 1",
        )
        self._check_router(experts, k)
        self._check_balance()

    def _check_router(self, experts: int, k: int) -> None:
        softmax = self.moe_router_score_function == "softmax"
        require(
            not softmax or k > 1 or self.moe_router_pre_softmax or experts == 1 or self._sinkhorn,
            "moe_router_topk=1 with a softmax over one score: its weight is 1, and the router learns nothing",
            "moe_router_pre_softmax=True",
        )
        require(softmax or not self.moe_router_pre_softmax, "moe_router_pre_softmax with sigmoid scores", "drop it")
        require(
            not softmax or not self.moe_router_enable_expert_bias,
            "moe_router_enable_expert_bias with softmax scores: a bias needs scores that are in (0, 1) each",
            "moe_router_score_function=sigmoid",
        )
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None or chosen is None:
            require(groups is chosen, f"moe_router_num_groups={groups} and moe_router_group_topk={chosen}", "give both")
            return
        divides(groups, experts, "moe_router_num_groups", "num_experts")
        require(chosen <= groups, f"moe_router_group_topk={chosen} of {groups} groups", f"choose 1 to {groups}")
        divides(chosen, k, "moe_router_group_topk", "moe_router_topk")
        require(
            k // chosen <= experts // groups,
            f"{k} experts from {chosen} groups of {experts // groups}",
            "choose fewer experts, or more or larger groups",
        )

    @property
    def _sinkhorn(self) -> bool:
        return self.moe_router_load_balancing_type == "sinkhorn"

    def _check_balance(self) -> None:
        self._check_balancing_losses()
        require(
            self.moe_expert_capacity_factor is not None or not self.moe_pad_expert_input_to_capacity,
            "moe_pad_expert_input_to_capacity without a capacity",
            "give moe_expert_capacity_factor",
        )
        self._check_sinkhorn()
        for name in ("moe_shared_expert_overlap", "moe_shared_expert_gate"):
            require(
                not getattr(self, name) or self.moe_shared_expert_intermediate_size is not None,
                f"{name} without a shared expert",
                "give moe_shared_expert_intermediate_size",
            )
        if self.moe_shared_expert_overlap:
            require(
                self.moe_token_dispatcher_type == "alltoall",
                f"moe_shared_expert_overlap with moe_token_dispatcher_type {self.moe_token_dispatcher_type}",
                "moe_token_dispatcher_type=alltoall, whose messages can travel meanwhile",
            )

    def _check_balancing_losses(self) -> None:
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if isinstance(kinds, tuple):
            names = ", ".join(BALANCING)
            require(
                len(set(kinds)) == len(kinds) >= 1 and set(kinds) <= set(BALANCING),
                f"moe_router_load_balancing_type={kinds} is no list of different losses",
                f"choose among {names}, each once",
            )
        as_many = isinstance(weights, tuple) == isinstance(kinds, tuple)
        if isinstance(weights, tuple) and isinstance(kinds, tuple):
            as_many = len(weights) == len(kinds)
        require(
            as_many,
            f"moe_aux_loss_coeff={weights} for moe_router_load_balancing_type={kinds}",
            "one weight for each type, in the same order",
        )
        for weight in weights if isinstance(weights, tuple) else (weights,):
            number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            require(number and weight >= 0.0, f"moe_aux_loss_coeff is {weights}", "numbers that are not negative")

    def _check_sinkhorn(self) -> None:
        """Check Sinkhorn routing: it replaces top-k, so fields that would bias top-k are refused."""
        if not self._sinkhorn:
            return
        changed = [
            name
            for name in (
                "moe_aux_loss_coeff",
                "moe_router_score_function",
                "moe_router_pre_softmax",
                "moe_router_topk_scaling_factor",
                "moe_router_enable_expert_bias",
                "moe_router_num_groups",
                "moe_expert_capacity_factor",
            )
            if getattr(self, name) != getattr(ExpertFields, name)
        ]
        require(
            not changed,
            f"moe_router_load_balancing_type sinkhorn with {', '.join(changed)}: it deals tokens out by itself",
            f"drop {', '.join(changed)}, or choose another type",
        )


def layer_pattern(frequency: str, layers: int, field: str = "moe_layer_freq") -> tuple[bool, ...]:
    """A flag for each layer: "2" is every second layer beginning with the first, "([0]*3+[1]*2)" lists them.

    Raises:
        ConfigError: the text is neither, or has another number of layers.
    """
    if frequency.isdigit() and int(frequency) >= 1:
        return tuple(i % int(frequency) == 0 for i in range(layers))
    parts = frequency.replace(" ", "").removeprefix("(").removesuffix(")").split("+")
    matches = [_FREQUENCY.fullmatch(part) for part in parts]
    if not all(matches):
        raise ConfigError(
            f"{field}={frequency!r} is neither a number nor a pattern",
            fix='every n-th layer: "n"; layer by layer: "([0]*3+[1]*58)" or "[0,1,1]"',
        )
    pattern = [m[1].replace(",", "") * int(m[2] or 1) for m in matches if m]
    flat = tuple(x == "1" for x in "".join(pattern))
    if len(flat) != layers:
        raise ConfigError(
            f"{field}={frequency!r} says {len(flat)} layers, num_layers is {layers}",
            fix="one 0 or 1 for every layer",
        )
    return flat
