"""Megatron's weights and arguments under our names, and ours under Megatron's.

The problem in a sentence: the tensors are the same, down to the order of rows, and have other names, layers are often
stacked into one tensor, and the vocabulary is padded.

| theirs                                                        | ours                                                |
|---------------------------------------------------------------|-----------------------------------------------------|
| `decoder.layers.self_attention.linear_proj.weight` [L, h, a d]| `decoder.layers.{l}....` [h, a d]                   |
| `decoder.layers.3....`, where layers differ                   | `decoder.layers.3....`                              |
| `self_attention.linear_qkv.layer_norm_weight`                 | `input_layernorm.weight`                            |
| `mlp.linear_fc1.layer_norm_weight`                            | `pre_mlp_layernorm.weight`                          |
| `mlp.experts.experts.linear_fc1.weight` [L, E, 2 f, h]        | `mlp.experts.weight1` [E, 2 f, h]                   |
| `embedding.word_embeddings.weight` [V', h]                    | [V, h]                                              |

The `args` of `common.pt` describe the model: of some nine hundred fields those are read that have a counterpart here,
and another value of a field in `ONLY`, which would change the mathematics, is refused.

`checkpoint/megatron_optimizer` reads the optimizer's state.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from minimegatron.checkpoint.sources import Copy, Described, Rows, Source, View
from minimegatron.config import TransformerConfig
from minimegatron.config.same_model import differing
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.models.chunks import stage_class

_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
_EXPERTS = {"linear_fc1.weight": "weight1", "linear_fc2.weight": "weight2"}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.weight)")
_NOT_THE_MODEL = ("optimizer", "chained_", "rng_state", "rerun_state", "opt_param_scheduler", "iteration")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

# Fields of `args` that are fields of ours.
SAME = (
    "num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size max_position_embeddings normalization "
    "qk_layernorm add_bias_linear add_qkv_bias untie_embeddings_and_output_weights position_embedding_type "
    "rotary_percent rotary_interleaved num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size "
    "moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor "
    "moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_gate"
    " make_vocab_size_divisible_by"
).split()
RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
# What would change the mathematics and has no counterpart here, or is not taken over.
ONLY: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False, None),
    "use_rope_scaling": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "no_rope_freq": (None,),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "attention_output_gate": (False, None),
    "quick_geglu": (False, None),
    "squared_relu": (False, None),
    "openai_gelu": (False, None),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "moe_apply_probs_on_input": (False, None),
    "mtp_num_layers": (None, 0),
    "use_legacy_models": (False, None),
    "is_hybrid_model": (False, None),
    "heterogeneous_layers_config_path": (None,),
    "experimental_attention_variant": (None,),
}


def config_from_args(args: Mapping[str, Any], vocab_size: int | None) -> TransformerConfig:
    """A configuration from Megatron's arguments.

    Args:
        args: those of `common.pt`.
        vocab_size: without padding, if they do not have it.

    Raises:
        ConfigError: a value that has no counterpart here; the vocabulary is not known.
    """
    refused = [f"{name}={args[name]!r}" for name, allowed in ONLY.items() if name in args and args[name] not in allowed]
    if args.get("num_experts") and args.get("add_bias_linear", True):
        refused.append("num_experts with add_bias_linear=True")
    if refused:
        raise ConfigError(
            f"Megatron's {', '.join(refused)} is not supported in a conversion", fix="convert a model without it"
        )
    fields = {name: args[name] for name in SAME if args.get(name) is not None}
    fields |= {ours: args[name] for name, ours in RENAMED.items() if args.get(name) is not None}
    fields["num_query_groups"] = (
        args.get("num_query_groups", 1) if args.get("group_query_attention") else args["num_attention_heads"]
    )
    fields["rotary_base"] = float(args.get("rotary_base", 10000.0))
    gelu = "gelu_tanh" if args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True) else "gelu"
    fields["activation"] = "swiglu" if args.get("swiglu") else gelu
    freq = args.get("moe_layer_freq", 1)
    fields["moe_layer_freq"] = str(list(freq) if isinstance(freq, list | tuple) else freq)
    fields["params_dtype"] = "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"
    vocabulary = vocab_size or args.get("vocab_size")
    if vocabulary is None:
        padded = args.get("padded_vocab_size")
        raise ConfigError(
            f"the checkpoint says that the padded vocabulary is {padded}, and not how many of these are tokens",
            fix="--true-vocab-size N: as many as the tokenizer has",
        )
    return TransformerConfig.from_dict({**fields, "vocab_size": vocabulary})


def args_of(config: TransformerConfig) -> dict[str, Any]:
    """Megatron's arguments for a model of ours.

    Raises:
        ConfigError: the model has a part that this conversion does not support.
    """
    found = stage_class(config)
    if why := found.megatron_lacks or "which has no such class" * (config.model_class is not None):
        raise ConfigError(f"a {found.__name__} is not written for Megatron, {why}", fix="--to hf, or --to ours")
    args: dict[str, Any] = {name: getattr(config, name) for name in SAME}
    args |= {name: getattr(config, ours) for name, ours in RENAMED.items()}
    args |= {
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.padded_vocab_size(1),
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "rotary_base": config.rotary_base,
        "swiglu": config.activation == "swiglu",
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "moe_layer_freq": [int(has) for has in config.expert_layers] if any(config.expert_layers) else 1,
        "bf16": config.params_dtype == "bf16",
        "fp16": config.params_dtype == "fp16",
        "params_dtype": config.dtype,
    }
    differences = differing(config, config_from_args(args, None))
    if differences:
        raise ConfigError(
            "the model is not written for Megatron:\n  " + "\n  ".join(differences),
            fix="the fields above are not converted",
        )
    return args


def _our_name(rest: str) -> tuple[str, int | None, bool]:
    """(our name in a layer, number of the expert, whether the tensor is a stack of experts)."""
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        return f"mlp.experts.{_EXPERTS[expert[2]]}", None if expert[1] is None else int(expert[1]), True
    for theirs, ours in _NORMS.items():
        if rest.startswith(theirs):
            return ours + rest.removeprefix(theirs), None, False
    return rest, None, False


def _matrices(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Rows, int]]:
    """(our name, rows of theirs, number of the expert or -1) for each matrix of a tensor of theirs."""
    match = _LAYER.fullmatch(name)
    if match is None:
        yield name, Rows(name, 0, shape[0]), -1
        return
    rest, expert, of_experts = _our_name(match[2])
    stacks = [range(n) for n in shape[: (match[1] is None) + (of_experts and expert is None)]]
    for stack in itertools.product(*stacks):
        layer, e = (int(n) if n is not None else None for n in (match[1], expert))
        layer = stack[0] if layer is None else layer
        e = -1 if not of_experts else stack[-1] if e is None else e
        yield f"decoder.layers.{layer}.{rest}", Rows(name, 0, shape[len(stack)], stack), e


def as_ours(theirs: Source, config: TransformerConfig, called: Mapping[str, str] | None = None) -> View:
    """Megatron's tensors under our names.

    Args:
        theirs: the checkpoint.
        config: configuration of the model.
        called: {name of a weight: the tensor that is read in its place}, for moments; default the weights themselves.

    Raises:
        CheckpointError: the vocabulary is larger than the tensor, or a tensor has another number of layers.
    """
    tensors: dict[str, Described] = {}
    copies: list[Copy] = []
    if called is None:
        called = {name: name for name in theirs.tensors if not name.startswith(_NOT_THE_MODEL)}
    for weight, name in called.items():
        dtype, shape = theirs.tensors[name]
        layer = _LAYER.fullmatch(weight)
        matrices = [*_matrices(weight, shape)] if len(shape) > (layer is not None and layer[1] is None) else []
        if not matrices or (layer is not None and layer[1] is None and shape[0] != config.num_layers):
            raise CheckpointError(
                f"{name} has shape {shape}, which does not fit {config.num_layers} layers",
                fix="check the configuration",
            )
        for ours, rows, expert in matrices:
            inner = list(shape[len(rows.matrix) :])
            if ours in _VOCABULARY:
                if inner[0] < config.vocab_size:
                    raise CheckpointError(
                        f"{name} has {inner[0]} rows, the vocabulary {config.vocab_size}", fix="--true-vocab-size N"
                    )
                inner[0] = config.vocab_size
            stack = () if expert < 0 else (expert,)
            experts = {expert + 1, *(tensors[ours].shape[:1] if ours in tensors else ())}
            tensors[ours] = Described(dtype, (*((max(experts),) if stack else ()), *inner))
            copies.append(Copy(Rows(ours, 0, inner[0], stack), rows._replace(name=name, stop=inner[0])))
    there = {(copy.ours.name, copy.ours.matrix) for copy in copies}  # experts may be tensors of their own
    lacks = [
        (n, e) for n, d in tensors.items() if len(d.shape) == 3 for e in range(d.shape[0]) if (n, (e,)) not in there
    ]
    if lacks:
        raise CheckpointError(f"{lacks[0][0]} lacks expert {lacks[0][1]}", fix="take another copy of the checkpoint")
    return View(theirs, tensors, copies)


def as_theirs(ours: Source, config: TransformerConfig) -> View:
    """Our tensors under Megatron's names, layers stacked if all are alike; the vocabulary padded with zeros."""
    layers: dict[str, set[str]] = {}  # number -> names in the layer
    for of_layer in filter(None, map(_LAYER.fullmatch, ours.tensors)):
        layers.setdefault(of_layer[1], set()).add(of_layer[2])
    alike = len(set(map(frozenset, layers.values()))) == 1
    tensors: dict[str, Described] = {}
    copies: list[Copy] = []
    for name, (dtype, shape) in ours.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            rows = (config.padded_vocab_size(1), *shape[1:]) if name in _VOCABULARY else shape
            tensors[name] = Described(dtype, rows)
            copies.append(Copy(Rows(name, 0, shape[0]), Rows(name, 0, shape[0])))
            continue
        n = int(match[1])
        stack = (n,) if alike else ()
        matrices = [(e,) for e in range(shape[0])] if len(shape) == 3 else [()]
        for rest in _their_names(match[2], "mlp.experts.weight1" in layers[match[1]]):
            theirs = f"decoder.layers.{'' if alike else f'{n}.'}{rest}"
            tensors[theirs] = Described(dtype, ((config.num_layers, *shape) if alike else shape))
            for expert in matrices:
                height = shape[len(expert)]
                copies.append(Copy(Rows(theirs, 0, height, (*stack, *expert)), Rows(name, 0, height, expert)))
    return View(ours, tensors, copies)


def extra_states(theirs: View) -> Iterator[str]:
    """Names of the `_extra_state` of linear layers and core attention: FP8 state, empty without FP8, but required."""
    for name, (_, shape) in theirs.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None or ".linear_" not in name or not name.endswith(".weight"):
            continue
        sizes = shape[: len(shape) - 2] if match[1] is None or len(shape) == 3 else (1,)
        modules = [name.removesuffix(".weight")]
        if name.endswith("self_attention.linear_proj.weight"):
            modules.append(name.replace("linear_proj.weight", "core_attention"))
        for at in itertools.product(*map(range, sizes)):
            shard = f"{'.'.join(map(str, at))}_{'.'.join(map(str, sizes))}"
            yield from (f"{module}._extra_state/shard_{shard}" for module in modules)


def _their_names(rest: str, with_experts: bool) -> list[str]:
    """Their names in a layer. The norm before experts has two names, depending on their layer spec: both are
    written."""
    for fc, weight in _EXPERTS.items():
        if rest == f"mlp.experts.{weight}":
            return [f"mlp.experts.experts.{fc}"]
    for theirs, ours in _NORMS.items():
        if ours in ("input_layernorm.", "pre_mlp_layernorm.") and rest.startswith(ours):
            fused = theirs + rest.removeprefix(ours)
            return [fused, rest] if with_experts and ours == "pre_mlp_layernorm." else [fused]
    return [rest]
