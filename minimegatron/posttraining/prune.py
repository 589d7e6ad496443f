"""Pruning: a smaller model from the parts of a larger one that its activations use most, for distillation to mend.

The problem in a sentence: which tenth of a model does the least, and what must change in the rest so that it does not
notice?

Of each kind the units with the largest scores on a calibration text stay (`posttraining/importance`): layers of the
model, channels of the residual stream for all layers alike, query heads in each group alike, groups and neurons in each
layer by itself. A group is a key head with its query heads; its score is the norm of the scores of those of its heads
that would stay.

The matrices lose the rows and columns of those that go. A unit whose activation is 0 changes nothing when it goes, but
for one number: a layer norm divides by a mean over h channels, and then over fewer. With e_i the mean of
x_i^2 / mean_j x_j^2 over the text (so that e has the mean 1), its gamma is multiplied by

    c = sqrt(mean of e_i over the channels that stay)            sqrt(h / h') if those that go are 0

and what the norm gives keeps its scale. For RMSNorm that is exact where the channels that go are 0; LayerNorm's mean
over channels is not corrected.

Weights are read a tensor at a time from the folder, whatever layout wrote it, and are those of the folder, to the bit.

Muralidharan et al. 2024 (Minitron, arXiv 2407.14679), section 2.3. Megatron-LM:
`examples/post_training/modelopt/prune.py`, which calls NVIDIA's ModelOpt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.sources import Described, Source, slices
from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError, require
from minimegatron.posttraining.importance import Scores

WIDTHS = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size")
TARGETS = (*WIDTHS, "num_layers")
HIDDEN, QKV, HEADS, FC1, FFN, WHOLE = "hidden", "qkv", "heads", "fc1", "ffn", ""
# What each dim of a tensor counts; of a tensor of a layer the name within the layer.
DIMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"), (WHOLE, HIDDEN)),
    "output_layer.weight": (WHOLE, HIDDEN),
    **{
        f"{norm}.{part}": (HIDDEN,)
        for norm in ("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm",
                     "decoder.final_layernorm")
        for part in ("weight", "bias")
    },
    "self_attention.linear_qkv.weight": (QKV, HIDDEN),
    "self_attention.linear_qkv.bias": (QKV,),
    "self_attention.q_layernorm.weight": (WHOLE,),
    "self_attention.k_layernorm.weight": (WHOLE,),
    "self_attention.linear_proj.weight": (HIDDEN, HEADS),
    "self_attention.linear_proj.bias": (HIDDEN,),
    "mlp.linear_fc1.weight": (FC1, HIDDEN),
    "mlp.linear_fc1.bias": (FC1,),
    "mlp.linear_fc2.weight": (HIDDEN, FFN),
    "mlp.linear_fc2.bias": (HIDDEN,),
    "mlp.router.weight": (WHOLE, HIDDEN),
    "mlp.router.expert_bias": (WHOLE,),
    "mlp.experts.weight1": (WHOLE, WHOLE, HIDDEN),
    "mlp.experts.weight2": (WHOLE, HIDDEN, WHOLE),
    "mlp.shared_experts.gate_weight": (WHOLE, HIDDEN),
    "mlp.shared_experts.linear_fc1.weight": (WHOLE, HIDDEN),
    "mlp.shared_experts.linear_fc2.weight": (HIDDEN, WHOLE),
}  # fmt: skip
_LAYERS = "decoder.layers."


def sizes_after(config: TransformerConfig, targets: Mapping[str, int]) -> dict[str, int]:
    """The sizes of `TARGETS` after pruning; those without a target stay.

    With as many groups as heads a head is a group, and one target stands for both. Otherwise heads without groups are
    taken from every group alike, and groups without heads take their heads with them.

    Raises:
        ConfigError: a target that is no size, or that the model does not allow; see the text.
    """
    now = {name: getattr(config, name) for name in TARGETS}
    for name, size in targets.items():
        flag = f"--target-{name.replace('_', '-')} {size}"
        require(1 <= size <= now[name], f"{flag}, and the model has {now[name]}", f"a number from 1 to {now[name]}")
    after = {**now, **targets}
    if config.queries_per_group == 1:
        both = {targets[name] for name in WIDTHS[:2] if name in targets}
        require(len(both) < 2, "heads and groups with other targets, and every head is a group", "one target for both")
        after |= dict.fromkeys(WIDTHS[:2], *(both or {now["num_query_groups"]}))
    elif "num_attention_heads" not in targets:
        after["num_attention_heads"] = after["num_query_groups"] * config.queries_per_group
    heads, groups = after["num_attention_heads"], after["num_query_groups"]
    per_group = heads // groups
    require(
        heads % groups == 0 and per_group <= config.queries_per_group,
        f"{heads} heads in {groups} groups, from {config.queries_per_group} heads in each of {config.num_query_groups}",
        f"as many heads for every group, at most {config.queries_per_group}",
    )
    changed = {name for name in TARGETS if after[name] != now[name]}
    _refuse(config, changed)
    return after


def _refuse(config: TransformerConfig, changed: set[str]) -> None:
    """Refuse what a model's parts do not allow."""
    heads, wide = changed & set(WIDTHS[:2]), changed & set(WIDTHS)
    rules = [
        (config.lora_rank, changed, "adapters lie beside the weights", "minimegatron lora merge first"),
        (config.mtp_num_layers, changed, "layers that predict further tokens read all of the model",
         "a model without --mtp-num-layers"),
        (config.multi_latent_attention, wide, "latents of multi_latent_attention are shared by all heads",
         "--target-num-layers alone"),
        (config.num_experts, changed & {"ffn_hidden_size"}, "each of the experts sees a few tokens of the text, which "
         "say little about its neurons", "--target-hidden-size, heads or layers"),
        (config.hybrid_override_pattern, changed, "layers that are one part each are scored by no rule",
         "a model without --hybrid-override-pattern"),
        (config.linear_attention_freq or config.attention_output_gate, changed, "layers of Gated DeltaNet and gated "
         "attention are scored by no rule", "a model without --linear-attention-freq and --attention-output-gate"),
        (config.sees, changed, "a text does not say which parts of a vision encoder are used",
         "a model of texts alone"),
        (config.qk_layernorm_over_heads, heads, "qk_layernorm_over_heads takes a mean over all heads",
         "--target-ffn-hidden-size, --target-hidden-size or --target-num-layers"),
        (config.scale_embeddings, changed & {"hidden_size"}, "scale_embeddings multiplies by sqrt(h)",
         "--target-ffn-hidden-size, heads or layers"),
    ]  # fmt: skip
    for has, what, why, fix in rules:
        require(not (has and what), f"{', '.join(sorted(what))} cannot be pruned here: {why}", fix)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The units that stay, ascending; what has no entry stays whole.

    Attributes:
        layers: their numbers.
        hidden: [h'] channels.
        heads: of each layer, [g', a' / g'] query heads; a row for each group.
        ffn: [f'] neurons of each layer.
        factors: name of a norm -> c.
    """

    layers: tuple[int, ...]
    hidden: torch.Tensor | None = None
    heads: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    ffn: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    factors: dict[str, float] = dataclasses.field(default_factory=dict)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest scores of the last dim, ascending; of equal ones the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values


def choose(config: TransformerConfig, after: Mapping[str, int], scores: Scores, dropped: Sequence[int]) -> Kept:
    """The units that stay.

    Args:
        config: the model.
        after: of `sizes_after`.
        scores: of `importance.measure`.
        dropped: numbers of the layers that go.
    """
    layers = tuple(number for number in range(config.num_layers) if number not in dropped)
    hidden, factors = None, {}
    if after["hidden_size"] < config.hidden_size:
        hidden = best(scores.hidden, after["hidden_size"])
        factors = {name: share[hidden].mean().sqrt().item() for name, share in scores.shares.items()}
    groups, per_group = after["num_query_groups"], after["num_attention_heads"] // after["num_query_groups"]
    heads = {}
    if (groups, per_group) != (config.num_query_groups, config.queries_per_group):
        for number in layers:
            of_heads = scores.heads[number].view(config.num_query_groups, -1)
            places = best(of_heads, per_group)
            stay = best(of_heads.gather(1, places).square().sum(1), groups)
            heads[number] = (places + torch.arange(len(of_heads))[:, None] * config.queries_per_group)[stay]
    ffn = {}
    if after["ffn_hidden_size"] < config.ffn_hidden_size:
        ffn = {number: best(scores.ffn[number], after["ffn_hidden_size"]) for number in layers}
    return Kept(layers, hidden, heads, ffn, factors)


def pruned_config(config: TransformerConfig, after: Mapping[str, int], kept: Kept) -> TransformerConfig:
    """The configuration of the pruned model; the width of a head stays, whatever h and a are."""
    changes: dict[str, Any] = dict(after)
    if len(kept.layers) < config.num_layers:
        patterns = {"window_attn_skip_freq": config.windowed_layers} if config.window_attn_skip_freq else {}
        patterns |= {"moe_layer_freq": config.expert_layers} if config.num_experts else {}
        changes |= {
            name: "[" + ",".join(str(int(pattern[number])) for number in kept.layers) + "]"
            for name, pattern in patterns.items()
        }
    return config.replace(**changes)


class Pruned:
    """The weights of the pruned model, read from those of the model.

    Args:
        source: the model's weights under our names.
        config: the model.
        kept: the units that stay.

    Raises:
        ConfigError: the model's width changes, and the dims of one of its tensors are not known.
    """

    def __init__(self, source: Source, config: TransformerConfig, kept: Kept) -> None:
        self.source, self.config, self.kept = source, config, kept
        self.tensors: dict[str, Described] = {}
        self._from: dict[str, tuple[str, list[torch.Tensor | None]]] = {}
        places = {number: place for place, number in enumerate(kept.layers)}
        for name, (dtype, shape) in source.tensors.items():
            number, inner = _of_layer(name)
            if number is not None and number not in places:
                continue
            new = name if number is None else f"{_LAYERS}{places[number]}.{inner}"
            if inner not in DIMS and (kept.hidden is not None or kept.heads or kept.ffn):
                raise ConfigError(f"{name} cannot be pruned in width", fix="--target-num-layers alone")
            dims = [self._units(kind, number) for kind in DIMS.get(inner, (WHOLE,) * len(shape))]
            self._from[new] = name, dims
            sizes = (n if units is None else len(units) for n, units in zip(shape, dims, strict=True))
            self.tensors[new] = Described(dtype, tuple(sizes))

    def _units(self, kind: str, number: int | None) -> torch.Tensor | None:
        """What stays of a dim; None for all of it."""
        if kind == WHOLE:
            return None
        if kind == HIDDEN:
            return self.kept.hidden
        assert number is not None
        if kind in (FC1, FFN):
            ffn, halves = self.kept.ffn.get(number), 2 if kind == FC1 and self.config.gated_linear_unit else 1
            f = self.config.ffn_hidden_size
            return None if ffn is None else torch.cat([ffn + half * f for half in range(halves)])
        heads = self.kept.heads.get(number)
        if heads is None:
            return None
        each, d = self.config.queries_per_group, self.config.kv_channels
        if kind == QKV:  # rows of a group: its query heads, its key, its value
            group = heads[:, :1] // each
            rows = (each + 2) * group
            heads = torch.cat([rows + heads % each, rows + each, rows + each + 1], 1)
        return (heads.flatten()[:, None] * d + torch.arange(d)).flatten()

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`. Reads a whole matrix of the model to cut it."""
        old, dims = self._from[name]
        shape = self.source.tensors[old].shape
        stacked = box is not None and len(shape) > 2  # of a stack only the matrices that are wanted
        tensor = self.source.read(old, ((box or ())[0], *((0, n) for n in shape[1:])) if stacked else None)
        for dim, units in enumerate(dims):
            tensor = tensor if units is None else tensor.index_select(dim, units)
        norm, _, part = old.rpartition(".")
        if part == "weight" and norm in self.kept.factors:
            shift = 1.0 if self.config.layernorm_zero_centered_gamma else 0.0
            tensor = ((tensor.double() + shift) * self.kept.factors[norm] - shift).to(tensor.dtype)
        if box is None:
            return tensor
        return tensor[slices(((0, len(tensor)), *box[1:]) if stacked else box)]


def _of_layer(name: str) -> tuple[int | None, str]:
    """(number of its layer, name within the layer); (None, name) of a tensor that is in no layer."""
    if not name.startswith(_LAYERS):
        return None, name
    number, _, inner = name.removeprefix(_LAYERS).partition(".")
    return int(number), inner


def described(config: TransformerConfig, scores: Scores, kept: Kept) -> Iterator[str]:
    """Lines: what goes, and how much of the activations it had."""
    gone = [number for number in range(config.num_layers) if number not in kept.layers]
    if gone:
        listed = ", ".join(f"{number} ({scores.influence[number]:.4f})" for number in gone)
        rest = min(scores.influence[number] for number in kept.layers)
        yield f"layers that go, with their block influence: {listed}; the least of those that stay has {rest:.4f}"
    if kept.hidden is not None:
        yield _share("channels of the residual stream", [scores.hidden], [kept.hidden])
    if kept.heads:
        yield _share("query heads", [scores.heads[n] for n in kept.heads], list(kept.heads.values()))
    if kept.ffn:
        yield _share("neurons", [scores.ffn[n] for n in kept.ffn], list(kept.ffn.values()))


def _share(what: str, scores: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> str:
    shares = [(x[k.flatten()].square().sum() / x.square().sum()).item() for x, k in zip(scores, kept, strict=True)]
    least = f", in the layer with the least {min(shares):.1%}" if len(shares) > 1 else ""
    count = f"{kept[0].numel()} of {len(scores[0])} {what}"
    return f"{count} stay, with {sum(shares) / len(shares):.1%} of the squared activations{least}"
