"""Lab 02, whose gradient is a part: what every rank holds whole, and uses on some tokens or some heads only."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

NAMES = [
    "embedding.word_embeddings.weight", "embedding.position_embeddings.weight",
    "layers.0.input_layernorm.weight", "layers.0.input_layernorm.bias",
    "layers.0.self_attention.linear_qkv.weight", "layers.0.self_attention.linear_qkv.bias",
    "layers.0.self_attention.q_layernorm.weight", "layers.0.self_attention.k_layernorm.weight",
    "layers.0.self_attention.linear_proj.weight", "layers.0.self_attention.linear_proj.bias",
    "layers.0.pre_mlp_layernorm.weight", "layers.0.pre_mlp_layernorm.bias",
    "layers.0.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc1.bias",
    "layers.0.mlp.linear_fc2.weight", "layers.0.mlp.linear_fc2.bias",
    "final_layernorm.weight", "final_layernorm.bias", "output_layer.weight",
]  # fmt: skip

_FEW_NAMES = [f"layers.0.{name}" for name in (
    "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias")]  # fmt: skip
_HEAD_BIASES = [f"layers.0.self_attention.{which}_layernorm.bias" for which in "qk"]  # of LayerNorm, not of RMSNorm


def _of_heads(name: str) -> bool:
    return "q_layernorm" in name or "k_layernorm" in name


def _of_tokens(name: str) -> bool:
    norm = "layernorm" in name and not _of_heads(name)
    return norm or name.endswith(("linear_proj.bias", "linear_fc2.bias")) or "position_embeddings" in name


def partial_gradients(names: list[str], sequence_parallel: bool) -> list[str]:
    return [n for n in names if _of_heads(n) or (sequence_parallel and _of_tokens(n))]


def _some_names(draw: Draw) -> dict[str, Any]:
    sp, layer = draw.choice([True, False]), draw.integer(1, 9)
    names = [n.replace("layers.0", f"layers.{layer}") for n in draw.random.sample(NAMES, draw.integer(10, 16))]
    return {"names": names, "sequence_parallel": sp}


def _backwards(sequence_parallel: bool) -> dict[str, Any]:
    """Layer numbers of one digit and of two, in reversed order, and norms of heads that have a bias."""
    layers = [n.replace("layers.0", f"decoder.layers.{i}") for i in (3, 12) for n in (*NAMES, *_HEAD_BIASES)]
    return {"names": list(dict.fromkeys(layers))[::-1], "sequence_parallel": sequence_parallel}


PARTIAL = Exercise(
    "partial_gradients",
    reference=partial_gradients,
    cases=[
        Case(
            "a norm and the two layers of an MLP, sequence parallelism",
            {"names": _FEW_NAMES, "sequence_parallel": True},
        ),
        Case("a GPT with sequence parallelism", {"names": NAMES, "sequence_parallel": True}),
        Case("the same without", {"names": NAMES, "sequence_parallel": False}),
        Case("other names, in any order", _some_names, hidden=True, fixed=[_backwards(True), _backwards(False)]),
    ],
    counted=True,
    idea="Of each name ask two things: does every rank hold the whole of it, and is it used on all tokens and heads?",
    hint="Partial is what is replicated over tp and used on only a part of the work: on this rank's tokens (with "
    "sequence parallelism) or on this rank's heads (always). What is cut over tp is complete.",
)
