"""Megatron's tensors, arguments and optimizer state under our names, and tensors and arguments back.

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
| `optimizer.state.exp_avg.decoder.layers....`                  | `optimizer.exp_avg.decoder.layers.{l}....`          |
| `optimizer.state.exp_avg_sq....`                              | `optimizer.exp_avg_sq....`                          |
| `optimizer.state.param....` or `.fp32_param....`              | `optimizer.fp32_param....`; of fp32 weights itself  |

`common.pt` holds the rest. Its `args` describe the model: of some nine hundred fields those are read that have a
counterpart here, and another value of a field in `ONLY`, which would change the mathematics, is refused.

| of `common.pt`                                    | ours                                     |
|---------------------------------------------------|------------------------------------------|
| `step` of a group, or `common_step`               | `optimizer.step....`, for each parameter |
| `grad_scaler`                                     | the same                                 |
| `opt_param_scheduler`, and `args`                 | `scheduler`                              |
| `iteration`, `args.consumed_train_samples`        | `counters`                               |
| `rng_state` (an object)                           | nothing: streams begin anew              |

Where an optimizer for dense parameters and one for experts are chained, names may begin with `chained_1.`. A moment
lies where its weight lies, so it goes through the same rules as the weight. Formats of a distributed optimizer that do
not store it so are refused:

| `param_state_sharding_type`  | stores                                                                          |
|------------------------------|---------------------------------------------------------------------------------|
| `fully_reshardable`          | what is above                                                                   |
| `dp_reshardable` (default)   | flat buckets of one tp and pp rank; nothing says which tensors they are made of |
| `fully_sharded_bucket_space` | the same, in older versions                                                     |
| `fully_sharded_model_space`  | flat pieces of tensors; 0.16.1 cannot write it                                  |
| `dp_zero_gather_scatter`     | a pickled object for each tp and pp rank                                        |

Megatron-LM: `sharded_state_dict` in `megatron/core/optimizer/optimizer.py` and `distrib_optimizer.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from minimegatron.checkpoint.ours import Continued
from minimegatron.checkpoint.sources import Copy, Described, InMemory, Rows, Source, View
from minimegatron.checkpoint.torch_dist import TorchDist, read_number
from minimegatron.config import TransformerConfig
from minimegatron.config.same_model import differing
from minimegatron.errors import CheckpointError, ConfigError

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
        args: of `common.pt`.
        vocab_size: without padding, where they do not say it.

    Raises:
        ConfigError: a value that has no counterpart here; the vocabulary is not known.
    """
    refused = [f"{name}={args[name]!r}" for name, allowed in ONLY.items() if name in args and args[name] not in allowed]
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
        ConfigError: it has a part that this conversion does not know.
    """
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
    """(our name in a layer, number of the expert, whether it is one of a stack of experts)."""
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
        config: of the model.
        called: their weights, and the tensors that lie in the places of these; default the weights themselves.

    Raises:
        CheckpointError: the vocabulary is larger than what is there, or a tensor is of another number of layers.
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
    """Our tensors under Megatron's names, layers stacked where all are alike; the vocabulary padded with zeros."""
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
    """Names of the `_extra_state` of linear layers and core attention: FP8's, empty without it, and asked for."""
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
    """In a layer. The norm before experts has two names, by the layer's specification: both are written."""
    for fc, weight in _EXPERTS.items():
        if rest == f"mlp.experts.{weight}":
            return [f"mlp.experts.experts.{fc}"]
    for theirs, ours in _NORMS.items():
        if ours in ("input_layernorm.", "pre_mlp_layernorm.") and rest.startswith(ours):
            fused = theirs + rest.removeprefix(ours)
            return [fused, rest] if with_experts and ours == "pre_mlp_layernorm." else [fused]
    return [rest]


KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "param": "fp32_param", "fp32_param": "fp32_param"}
FORMATS = ("fully_reshardable", "not distributed")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
WEIGHTS_ONLY = "--no-load-optim converts the weights alone; a run that loads them begins with a new optimizer"
_SCHEDULE = (
    "num_steps max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style"
).split()


def optimizer_state(theirs: TorchDist, common: Mapping[str, Any]) -> str:
    """What a checkpoint of Megatron's holds of an optimizer, in words; "" for nothing."""
    names = [name for name in (*theirs.tensors, *theirs.objects) if name.startswith(("optimizer.", "chained_"))]
    if not names:
        return ""
    details = f"{len(names)} tensors and objects, {_format_of(theirs, common)}, the first is {min(names)}"
    return f"the state of an optimizer ({details})"


def _format_of(theirs: TorchDist, common: Mapping[str, Any]) -> str:
    """By what is said, and where nothing is, by what there is."""
    formats = {str(one["param_state_sharding_type"]) for one in _chain(common) if "param_state_sharding_type" in one}
    if formats:
        return " and ".join(sorted(formats))
    if any(".dp_group_idx_" in name for name in theirs.tensors):
        return "dp_reshardable"
    distributed = any(name.startswith(("optimizer.distributed.", "chained_")) for name in theirs.objects)
    return "of a distributed optimizer" if distributed else "not distributed"


def _chain(common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of `common.pt` of each optimizer: one, or as many as are chained."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    chained = bool(optimizer) and all(type(key) is int for key in optimizer)
    return [one for one in (optimizer.values() if chained else [optimizer]) if isinstance(one, dict)]


def continued(theirs: TorchDist, common: Mapping[str, Any], config: TransformerConfig, weights: Source) -> Continued:
    """What a run goes on with.

    Args:
        theirs: the checkpoint.
        common: its `common.pt`.
        config: of the model.
        weights: of the model under our names.

    Raises:
        CheckpointError: it is stored in a format that is not read, or a part of it is missing.
    """
    folder, format_name = theirs.folder, _format_of(theirs, common)
    if format_name not in FORMATS:
        raise CheckpointError(
            f"{optimizer_state(theirs, common)} is stored in a form that is not read",
            where=str(folder),
            fix="let Megatron save it with --dist-ckpt-optim-fully-reshardable, or " + WEIGHTS_ONLY,
        )
    try:
        step = _step(theirs, common)
        tensors = _moments(theirs, config, weights)
        state = _state(theirs, common, step)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the state of the optimizer lacks something, or is not Adam's: {error}",
            where=str(folder),
            fix=WEIGHTS_ONLY,
        ) from None
    steps = {name: torch.tensor(float(step)) for name in tensors["optimizer.exp_avg."].tensors}
    return Continued(state["counters"]["iteration"], {**tensors, "optimizer.step.": InMemory(steps)}, state)


def _moments(theirs: TorchDist, config: TransformerConfig, weights: Source) -> dict[str, Source]:
    """Moments and main parameters under our names, each where its weight lies."""
    called: dict[str, dict[str, str]] = {}
    for name in theirs.tensors:
        if name.startswith(("optimizer.", "chained_")):
            match = _STATE.fullmatch(name)
            if match is None or match[1] not in KINDS:
                raise ValueError(f"there is {name}")
            if called.setdefault(KINDS[match[1]], {}).setdefault(match[2], name) != name:
                raise ValueError(f"{match[1]} of {match[2]} is there twice")
    views = {kind: as_ours(theirs, config, names) for kind, names in called.items()}
    trained = {name: d for name, d in weights.tensors.items() if not name.endswith(".expert_bias")}
    half_precision = any(described.dtype != torch.float32 for described in trained.values())
    for kind in ("exp_avg", "exp_avg_sq", *["fp32_param"] * half_precision):
        moments = views[kind].tensors
        for name in sorted(trained.keys() | moments.keys()):
            if name not in trained or name not in moments or moments[name] != (torch.float32, trained[name].shape):
                raise ValueError(f"{kind} of {name} is {moments.get(name, 'not there')}")
    if not half_precision and "fp32_param" in views:
        _require_equal(views.pop("fp32_param"), weights)
    return {f"optimizer.{kind}.": view for kind, view in views.items()}


def _require_equal(main: View, weights: Source) -> None:
    """fp32 weights are their own main parameters; the copy that is stored must say the same."""
    for name in main.tensors:
        if not torch.equal(main.read(name), weights.read(name)):
            raise ValueError(f"the main parameter of {name} is not its weight, and both are fp32")


def _step(theirs: TorchDist, common: Mapping[str, Any]) -> int:
    """How often Adam has moved."""
    counts = set[float]()
    for optimizer in _chain(common):
        state = optimizer.get("optimizer", optimizer)  # of an optimizer in fp32 it is torch's own
        shared = state.get("state", {}).get("common_step")
        steps = [group["step"] for group in state["param_groups"] if "step" in group] if shared is None else [shared]
        counts |= {read_number(theirs.folder, step) for step in steps}
    if len(counts) != 1:
        raise ValueError(f"its steps are {sorted(counts)}")
    return int(counts.pop())


def _state(theirs: TorchDist, common: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Counters, schedule and loss scale."""
    args, schedule, iteration = common["args"], common["opt_param_scheduler"], common["iteration"]
    counters = {
        "iteration": _whole(iteration),
        "consumed_train_samples": _whole(args["consumed_train_samples"]),
        "consumed_valid_samples": _whole(args.get("consumed_valid_samples", 0)),
        "skipped_iterations": max(0, iteration - step),
        "validation_loss": None,
        "recent_losses": [],
    }
    decay = args.get("lr_wsd_decay_iters")
    scheduler = {name: _plain(schedule[name]) for name in _SCHEDULE} | {
        "init_lr": _plain(args.get("lr_warmup_init", 0.0)),
        "wsd_decay_steps": None if decay is None else decay * args["global_batch_size"],
        "lr_wsd_decay_style": _plain(args.get("lr_wsd_decay_style", "exponential")),
    }
    scales = [one.get("grad_scaler") for one in _chain(common)]
    scaler = {name: read_number(theirs.folder, value) for name, value in (scales[0] or {}).items()}
    return {"counters": counters, "validation_loss": None, "scheduler": scheduler, "grad_scaler": scaler}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a counter is {value!r}")
    return value


def _plain(value: Any) -> int | float | str:
    if type(value) not in (int, float, str):
        raise ValueError(f"the schedule has {value!r}")
    return value  # type: ignore[no-any-return]
