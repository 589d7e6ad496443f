"""Train four tiny models with Megatron for ten steps, in several layouts, and record every loss and gradient norm.

The weights are drawn from parameter names (`tests/golden/megatron_names.py`) and cut here as Megatron's layers expect:
over tp along the dimension that the parameter says, and a gated `linear_fc1` as two halves, so that rank r holds
[gate_r; up_r]. The logical model is therefore the same in every layout, and so must be the trace, up to the rounding of
sums taken in another order. `layouts` records how far each layout strays from the trace of a single rank.

What to compare with: `trace[i] = [mean loss before step i, norm of the gradient before clipping]`. To locate a
difference: the gradient norm of each parameter at the first step, and the norm of each parameter after the last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.golden import megatron_names
from tests.oracle import ranks

STEPS = 10

GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 64,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
    "max_position_embeddings": 16,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "qk_layernorm": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "activation": "gelu",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
}
LLAMA = {**GPT, "num_query_groups": 2, "normalization": "RMSNorm", "add_bias_linear": False, "activation": "swiglu"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": {**LLAMA, "kv_channels": 16, "qk_layernorm": True, "add_qkv_bias": True},
    "gpt2": {**GPT, "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False},
}
OPTIMIZER: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 3e-3,  # at 1e-2 rounding differences between layouts grow to 6e-5 within the ten steps
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
}
DATA = {"seed": 7, "microbatches": 8, "micro_batch_size": 2, "seq_length": 16, "vocab_size": 64}

# name -> world, tp, pp, sequence parallel, distributed optimizer
LAYOUTS: dict[str, tuple[int, int, int, bool, bool]] = {
    "serial": (1, 1, 1, False, False),
    "tp2": (2, 2, 1, False, False),
    "tp2 sp": (2, 2, 1, True, False),
    "dp2": (2, 1, 1, False, False),
    "pp2": (2, 1, 2, False, False),
    "tp2 dp2 sp, distributed optimizer": (4, 2, 1, True, True),
}


def make() -> dict[str, Any]:
    """Per model: configuration, trace of one rank, per-parameter norms, and the largest difference of each layout."""
    runs = {
        layout: ranks.run(_models, world, *sizes, tp=sizes[0], pp=sizes[1])
        for layout, (world, *sizes) in LAYOUTS.items()
    }
    models = {}
    for name, model in MODELS.items():
        reference = runs["serial"][name]
        strays = {}
        for layout, results in runs.items():
            pairs = zip(results[name]["trace"], reference["trace"], strict=True)
            strays[layout] = max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
        models[name] = {"model": model, **reference, "layouts": strays}
    recipe = {
        "weights": "tests/golden/megatron_names.py: seeded_weight(name, logical shape)",
        "batches": "seeded_batches(data): the microbatches of every step; dp rank r takes r, r + dp, r + 2 dp, ...",
        "loss": "mean over all tokens of the step",
        "tolerance": "2e-5 absolute over ten steps in fp32; the first three steps agree to 2e-6",
    }
    return {"recipe": recipe, "data": DATA, "optimizer": OPTIMIZER, "models": models}


def _models(_: int, __: int, *layout: Any) -> dict[str, Any]:
    return {name: _train(model, *layout) for name, model in MODELS.items()}


def _train(
    model: dict[str, Any], tp: int, pp: int, sequence_parallel: bool, distributed_optimizer: bool
) -> dict[str, Any]:
    """The trace of one model on this layout; per-parameter norms only when this rank holds the whole model."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, gpt = _build(model, tp, pp, sequence_parallel)
    named = _fill(gpt, model, tp)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=True
    )
    ddp = DistributedDataParallel(config, ddp_config, gpt)
    config.finalize_model_grads_func = finalize_model_grads
    settings = {k: v for k, v in OPTIMIZER.items() if k != "lr_decay_style"}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**settings, use_distributed_optimizer=distributed_optimizer), [ddp]
    )
    _schedule(optimizer)
    config.grad_scale_func = optimizer.scale_loss

    batches = megatron_names.seeded_batches(DATA)
    mine = batches[state.get_data_parallel_rank() :: state.get_data_parallel_world_size()]
    results: dict[str, Any] = {"trace": []}
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(mine),
            model=ddp,
            num_microbatches=len(mine),
            seq_length=DATA["seq_length"],
            micro_batch_size=DATA["micro_batch_size"],
            forward_only=False,
        )
        if tp * pp == 1 and step == 0:
            results["first_grad_norms"] = {
                name: parameter.main_grad.double().norm().item() for name, parameter in named.items()
            }
        _, grad_norm, _ = optimizer.step()
        # Every tp rank of the last stage holds every loss of its microbatches.
        total = torch.tensor(sum(loss["loss"].item() for loss in losses), dtype=torch.float64)
        dist.all_reduce(total)
        results["trace"].append([total.item() / tp / DATA["microbatches"], float(grad_norm)])
    if tp * pp == 1:
        results["last_param_norms"] = {
            name: parameter.detach().double().norm().item() for name, parameter in named.items()
        }
    return results


def _schedule(optimizer: Any) -> None:
    """Constant rates. Without a scheduler Megatron's groups keep `wd_mult` but decay biases and norms like the rest."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    lr, min_lr, decay = (OPTIMIZER[k] for k in ("lr", "min_lr", "weight_decay"))
    OptimizerParamScheduler(optimizer, lr, lr, min_lr, 0, STEPS, "constant", decay, decay, STEPS, "constant")


def _forward_step(batches: Any, model: torch.nn.Module) -> Any:
    """Megatron's forward_step: the losses of one microbatch `[b, s]`, and how to make them one number."""
    tokens = next(batches)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    b, s = inputs.shape
    masked = torch.triu(torch.ones(1, 1, s, s), diagonal=1).bool()
    losses = model(inputs, torch.arange(s).expand(b, s).contiguous(), masked, labels=labels)
    return losses, lambda x: (x.float().mean(), {"loss": x.detach().float().mean().clone()})


def _build(model: dict[str, Any], tp: int, pp: int, sequence_parallel: bool) -> tuple[Any, torch.nn.Module]:
    """This stage of the model, without any of the fusions that need a GPU."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    same = (
        "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size normalization "
        "layernorm_epsilon qk_layernorm add_bias_linear add_qkv_bias"
    )
    gated = model["activation"] == "swiglu"
    config = TransformerConfig(
        **{field: model[field] for field in same.split()},
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sequence_parallel,
        **ranks.PLAIN_CONFIG,
    )
    config.batch_p2p_comm = True
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=model["qk_layernorm"], normalization=model["normalization"]
        ),
        vocab_size=model["vocab_size"],
        max_sequence_length=model["max_position_embeddings"],
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        position_embedding_type=model["position_embedding_type"],
        rotary_base=model["rotary_base"],
        rotary_percent=model["rotary_percent"],
        share_embeddings_and_output_weights=not model["untie_embeddings_and_output_weights"],
    )
    return config, gpt


def _fill(gpt: torch.nn.Module, model: dict[str, Any], tp: int) -> dict[str, torch.nn.Parameter]:
    """Overwrite this stage's weights with its part of the seeded ones; returns its parameters by global name."""
    from megatron.core import parallel_state as state

    shapes = megatron_names.parameter_shapes(model)
    gated = model["activation"] == "swiglu"
    named = {}
    for local_name, parameter in gpt.named_parameters():
        name = local_name
        if name.startswith("decoder.layers."):
            index = name.split(".")[2]
            name = name.replace(f".{index}.", f".{gpt.decoder.layers[int(index)].layer_number - 1}.", 1)
        if name == "output_layer.weight" and name not in shapes:
            name = "embedding.word_embeddings.weight"  # the last stage's copy of the tied matrix
        full = megatron_names.seeded_weight(name, shapes[name])
        if getattr(parameter, "tensor_model_parallel", False):
            halves = full.chunk(2) if gated and ".linear_fc1." in name else (full,)
            rank = state.get_tensor_model_parallel_rank()
            full = torch.cat([half.chunk(tp, parameter.partition_dim)[rank] for half in halves])
        assert parameter.shape == full.shape, (
            f"{name}: Megatron has {tuple(parameter.shape)}, the recipe {tuple(full.shape)}"
        )
        parameter.data.copy_(full)
        named[name] = parameter
    assert state.get_pipeline_model_parallel_world_size() > 1 or named.keys() == shapes.keys(), (
        "a parameter has no recipe"
    )
    return named
