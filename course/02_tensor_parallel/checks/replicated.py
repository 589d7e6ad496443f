"""Lab 02, whose gradient is a part: what every rank holds whole, and uses on some tokens or some heads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake

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


_ROW_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
_ROW_BIASES = ("linear_proj.bias", "linear_fc2.bias")
_COLUMN_BIASES = ("linear_qkv.bias", "linear_fc1.bias")


def _choose(rule: Callable[[str, bool], bool]) -> Callable[..., list[str]]:
    return lambda names, sequence_parallel: [n for n in names if rule(n, sequence_parallel)]


def _all_but(ends: str | tuple[str, ...]) -> Callable[..., list[str]]:
    return _choose(lambda n, sp: partial_gradients([n], sp) != [] and not n.endswith(ends))


def _and(*parts: str, only_with_sp: bool) -> Callable[..., list[str]]:
    """Return a mistaken answer: the right names, and those that contain one of the parts."""
    return _choose(
        lambda n, sp: partial_gradients([n], sp) != [] or ((sp or not only_with_sp) and any(p in n for p in parts))
    )


def _column_for_row(name: str, sp: bool) -> bool:
    """The biases of the column layers in place of those of the row layers."""
    return (partial_gradients([name], sp) != [] and not name.endswith(_ROW_BIASES)) or (
        sp and name.endswith(_COLUMN_BIASES)
    )


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
    mistakes=[
        Mistake(
            _choose(lambda n, sp: True),
            "These are all names. What is cut over tp has its whole gradient on the rank that holds it.",
        ),
        Mistake(
            _choose(lambda n, sp: sp and (_of_tokens(n) or _of_heads(n))),
            "The norms of queries and keys see only this rank's heads: partial also without sequence parallelism.",
        ),
        Mistake(
            _choose(lambda n, sp: (sp and "layernorm" in n) or _of_heads(n)),
            "Norms are not all: something else is replicated, too, and is added to this rank's tokens only.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] and "position" not in n),
            "The positions are missing: they are added to this rank's tokens only.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] or (sp and n.endswith("bias"))),
            "A column layer's bias is cut over tp as its rows are: each rank's part is complete.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] or (sp and n.endswith(_ROW_WEIGHTS))),
            "A row layer's weight is cut over tp, and each rank multiplies its part with all tokens: it is complete.",
        ),
        Mistake(
            _choose(lambda n, sp: sp and _of_tokens(n)),
            "Norms of queries and keys are missing: every rank has the whole weight, and only some of the heads.",
        ),
        *(
            Mistake(
                chosen, "A norm's bias is replicated, too: with sequence parallelism it sees this rank's tokens only."
            )
            for chosen in (
                _choose(lambda n, sp: _of_heads(n) or (sp and _of_tokens(n) and not n.endswith("norm.bias"))),
                _choose(lambda n, sp: (_of_heads(n) or (sp and _of_tokens(n))) and not n.endswith("norm.bias")),
            )
        ),
        *(
            Mistake(
                _all_but(other),
                "Biases of row layers are missing: they are replicated, and added to this rank's tokens.",
            )
            for other in (*_ROW_BIASES, _ROW_BIASES)
        ),
        *(
            Mistake(
                _all_but(ends), "What holds for the norm of the queries holds for that of the keys: one is missing."
            )
            for ends in (("q_layernorm.weight", "q_layernorm.bias"), ("k_layernorm.weight", "k_layernorm.bias"))
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] and ("layers." not in n or "layers.0." in n)),
            "Only names of layer 0 are found: a model has more layers.",
        ),
        Mistake(
            _choose(_column_for_row),
            "You took the biases of the column layers for those of the row layers: a column layer's bias is cut.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] and "final" not in n),
            "The norm behind the last layer is missing.",
        ),
        *(
            Mistake(
                _and(words, only_with_sp=True),
                "A matrix of words is cut by its rows, and each rank sees all tokens there: its gradient is complete.",
            )
            for words in ("word_embeddings", "output_layer")
        ),
        *(
            Mistake(
                _and(*of, only_with_sp=False),
                "Without sequence parallelism every rank sees all tokens: norms and row biases are complete then.",
            )
            for of in (("layernorm",), _ROW_BIASES, ("position",))
        ),
        Mistake(
            lambda names, sequence_parallel: sorted(partial_gradients(names, sequence_parallel)),
            "These are the right names, sorted; they keep the order of the list.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) == []),
            "These are all the others: asked are the names whose gradients are only a part.",
        ),
        Mistake(
            _choose(lambda n, sp: _of_tokens(n) or _of_heads(n)),
            "Without sequence parallelism every rank sees all tokens: norms and row biases are complete then.",
        ),
    ],
    idea="Of each name ask two things: does every rank hold the whole of it, and is it used on all tokens and heads?",
    hint="Partial is what is replicated over tp and used on only a part of the work: on this rank's tokens (with "
    "sequence parallelism) or on this rank's heads (always). What is cut over tp is complete.",
)
