"""Checkpoints that Megatron writes and reads on the CPU, in its own format: `torch_dist`.

What a training of Megatron-LM puts into one is a dictionary with `args`, `iteration` and the model's shards
(`generate_state_dict` in `megatron/training/checkpointing.py`); Megatron-Core writes it. The weights are those that
`tests/golden/megatron_names.py` draws from their names, so that a reader knows every number. `trained.py` writes one
with an optimizer.

    python -m tests.oracle.torch_dist write FOLDER llama 2 1      the frozen one of tests/golden: a model, tp and pp
    python -m tests.oracle.torch_dist read FOLDER llama 1 2       how far each tensor is from what it should be

Megatron starts processes that outlive a test, so tests call this as a program.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from minimegatron.checkpoint.conversion import logical_tensors
from minimegatron.checkpoint.megatron import config_from_args
from tests.golden import megatron_names
from tests.oracle import gpt, moe, ranks

TINY = {"num_layers": 2, "hidden_size": 16, "kv_channels": 4, "ffn_hidden_size": 24, "vocab_size": 62}
MODELS: dict[str, dict[str, Any]] = {
    name: {**model, **TINY, "kv_channels": 8 if name == "qwen" else 4, "padded_vocab_size": 64}
    for name, model in gpt.MODELS.items()
}
MODELS["moe"] = {
    **gpt.GPT, "num_layers": 2, "add_bias_linear": False, "vocab_size": 64, "padded_vocab_size": 64, "num_experts": 4,
    "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_layer_freq": 1,
}  # fmt: skip


def arguments(model: dict[str, Any]) -> argparse.Namespace:
    """What Megatron-LM's `args` says of a model, under its names."""
    same = (
        "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size vocab_size "
        "padded_vocab_size make_vocab_size_divisible_by max_position_embeddings normalization qk_layernorm "
        "add_bias_linear add_qkv_bias untie_embeddings_and_output_weights position_embedding_type rotary_base "
        "rotary_percent"
    )
    gated = model["activation"] == "swiglu"
    return argparse.Namespace(
        **{name: model[name] for name in same.split()},
        group_query_attention=True,
        norm_epsilon=model["layernorm_epsilon"],
        swiglu=gated,
        bias_gelu_fusion=False,
        params_dtype=torch.float32,
        bf16=False,
        fp16=False,
        rotary_interleaved=False,
        tensor_model_parallel_size=2,
        **{"num_experts": None, **{name: model[name] for name in model if "moe" in name or name == "num_experts"}},
    )


def _megatrons(name: str, tp: int, pp: int) -> tuple[dict[str, Any], torch.nn.Module]:
    model = MODELS[name]
    if name == "moe":
        return model, moe.experts()[1]
    _, built = gpt._build({**model, "vocab_size": model["padded_vocab_size"]}, tp, pp, False)
    gpt._fill(built, {**model, "vocab_size": model["padded_vocab_size"]}, tp)
    return model, built


def _write(rank: int, world: int, folder: str, name: str, tp: int, pp: int, how: str) -> None:
    from megatron.core import dist_checkpointing

    model, built = _megatrons(name, tp, pp)
    metadata = {"non_homogeneous_layers": True} if how == "numbered" else {}
    shards = built.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    state = {"args": arguments(model), "checkpoint_version": 3.0, "iteration": 10, "model": shards}
    dist_checkpointing.save(state, folder)


def write(folder: str, name: str, tp: int = 1, pp: int = 1, how: str = "stacked") -> None:
    """A checkpoint that Megatron writes; the folder is there and empty.

    Args:
        how: layers "stacked" or "numbered".
    """
    ranks.run(_write, tp * pp, folder, name, tp, pp, how, tp=tp, pp=pp)


def _read(rank: int, world: int, folder: str, name: str, tp: int, pp: int) -> dict[str, float]:
    from megatron.core import dist_checkpointing

    _, built = _megatrons(name, tp, pp)
    wanted = {key: value.clone() for key, value in built.state_dict().items() if isinstance(value, torch.Tensor)}
    for parameter in built.parameters():
        parameter.data.zero_()
    loaded = dist_checkpointing.load({"model": built.sharded_state_dict()}, folder)  # type: ignore[operator]
    built.load_state_dict(loaded["model"])
    return {key: (value - wanted[key]).abs().max().item() for key, value in built.state_dict().items() if key in wanted}


def read(folder: str, name: str, tp: int = 1, pp: int = 1) -> dict[str, float]:
    """How far what Megatron reads from a folder is from the seeded weights, for each tensor of rank 0."""
    return ranks.run(_read, tp * pp, folder, name, tp, pp, tp=tp, pp=pp)  # type: ignore[no-any-return]


def _of_experts(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the model with experts; a stack is made of matrices that have names of their own in Megatron."""
    if not name.endswith(("experts.weight1", "experts.weight2")):
        weight = moe.seeded(name, shape) * 0.05
        return weight + 1 if "norm" in name else weight
    one = f"{name.removesuffix(name[-7:])}local_experts.{{}}.linear_fc{name[-1]}.weight"
    return torch.stack([moe.seeded(one.format(e), shape[1:]) * 0.05 for e in range(shape[0])])


def seeded(name: str) -> dict[str, torch.Tensor]:
    """The logical tensors, without padding of the vocabulary."""
    model = MODELS[name]
    if name == "moe":
        return {
            key: _of_experts(key, d.shape)
            for key, d in logical_tensors(config_from_args(vars(arguments(model)), None)).items()
        }
    state = megatron_names.seeded_state_dict({**model, "vocab_size": model["padded_vocab_size"]})
    return {key: value[: model["vocab_size"]] if "word_emb" in key or "output_layer" in key else value
            for key, value in state.items()}  # fmt: skip


if __name__ == "__main__":
    what, folder, name, tp, pp, *how = sys.argv[1:]
    if what == "write":
        write(folder, name, int(tp), int(pp), *how)
    else:
        print(json.dumps(read(folder, name, int(tp), int(pp))))
