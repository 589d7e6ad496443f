"""Lab 02, what is computed before anything runs: bytes, activations, whose gradient is partial, six questions.

Bytes are what one rank sends when collectives run as rings; activations are those of Korthikanti et al. 2022, 16 bits,
with dropout and stored attention scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

# --------------------------------------------------------------------------------------------- bytes of a layer


def bytes_per_layer(s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool) -> float:
    """What each rank sends over tp for one layer, forward and backward, when collectives run as rings."""
    return (10 if sequence_parallel else 8) * s * b * h * element_size * (t - 1) / t


def _a_layer(sequence_parallel: bool) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        shape = {"s": 128 * draw.integer(1, 64), "b": draw.integer(2, 8), "h": 64 * draw.integer(8, 256)}
        return {
            **shape, "t": draw.choice([2, 4, 8]), "element_size": draw.choice([1, 4]),
            "sequence_parallel": sequence_parallel,
        }  # fmt: skip

    return sizes


def _factor(plain: float, sequence: float) -> Callable[..., float]:
    def nbytes(s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool) -> float:
        return (sequence if sequence_parallel else plain) * s * b * h * element_size * (t - 1) / t

    return nbytes


_GPT3 = {"s": 2048, "b": 1, "h": 12288}
_HANDFUL = {"s": 4, "b": 3, "h": 4, "t": 4, "element_size": 1}
_ODD = {"s": 100, "b": 2, "h": 70, "t": 3, "element_size": 4}  # t does not divide

BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        Case("s*b*h = 4*3*4 elements of 1 byte on 4 ranks; GPT-3 on 8", {**_HANDFUL, "sequence_parallel": False},
             fixed=[{**_GPT3, "t": 8, "element_size": 2, "sequence_parallel": False}]),
        Case("the same with sequence parallelism", {**_HANDFUL, "sequence_parallel": True},
             fixed=[{**_GPT3, "t": 8, "element_size": 2, "sequence_parallel": True}]),
        Case("one rank sends nothing", {**_GPT3, "t": 1, "element_size": 2, "sequence_parallel": True}),
        Case("other layers", _a_layer(False), hidden=True, fixed=[{**_ODD, "sequence_parallel": False}]),
        Case("other layers, sequence parallelism", _a_layer(True), hidden=True,
             fixed=[{**_ODD, "sequence_parallel": True}]),
    ],
    mistakes=[
        Mistake(_factor(8, 8), "Two all-gathers are missing: x is stored cut, and the backward pass needs it whole for "
                "dW, once for each pair."),
        *(
            Mistake(rounded, "Nothing is rounded: with // the rest of a division is lost.")
            for rounded in (
                lambda **given: bytes_per_layer(**given) // 1,
                lambda s, b, h, t, element_size, sequence_parallel: (10 if sequence_parallel else 8)
                * (s * b * h * element_size // t) * (t - 1),
                lambda s, b, h, t, element_size, sequence_parallel: (10 if sequence_parallel else 8)
                * (s * b * h * element_size * (t - 1) // t),
                lambda s, b, h, t, element_size, sequence_parallel: 4 * (2 * s * b * h * element_size * (t - 1) // t)
                + 2 * sequence_parallel * (s * b * h * element_size * (t - 1) // t),
                lambda s, b, h, t, element_size, sequence_parallel: (10 if sequence_parallel else 8)
                * s * b * h * element_size * ((t - 1) // t),
            )
        ),
        Mistake(
            _factor(4, 4),
            "Half of it. Forward and backward each send two sums, and a ring all-reduce sends its tensor almost twice: "
            "2 n (t-1)/t.",
        ),
        Mistake(
            lambda s, b, h, t, element_size, sequence_parallel: _factor(8, 10)(s, b, h, t, 2, sequence_parallel),
            "You count 2 bytes an element, whatever `element_size` says.",
        ),
        Mistake(
            lambda b, **rest: _factor(8, 10)(b=1, **rest),
            "You count one sequence: a batch has b of them.",
        ),
        Mistake(_factor(8, 9), "One all-gather is missing: a layer has two column layers, and the backward pass "
                "gathers the input of each."),
        Mistake(_factor(8, 5), "Forward and backward: what is said of one way holds for the other."),
        Mistake(
            lambda s, b, h, t, element_size, sequence_parallel: (10 if sequence_parallel else 8)
            * s * b * h * element_size,
            "A ring sends t-1 of t parts: one rank alone sends nothing.",
        ),
    ],
    idea="Count the arrows of the picture in both directions, and what each of them sends; then what it does not show.",
    hint="Two column-row pairs, each with one sum forward and one backward, of s*b*h elements. An all-reduce costs "
    "2 n (t-1)/t; with sequence parallelism each becomes an all-gather and a reduce-scatter, and each pair gathers its "
    "input once more.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- activations


def activation_bytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> float:
    """Korthikanti et al. 2022, table 2: 16-bit activations of one layer with dropout and stored attention scores."""
    if sequence_parallel:
        return s * b * h / t * (34 + 5 * a * s / h)
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def _activations(everything: float, divided: float, scores: float = 5.0, scores_cut: bool = True) -> Any:
    def nbytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> float:
        whole = 0.0 if sequence_parallel else everything
        cut = everything + divided if sequence_parallel else divided
        return s * b * h * (whole + cut / t) + scores * a * s * s * b / (t if scores_cut else 1)

    return nbytes


def _a_model(sequence_parallel: bool) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        a = 8 * draw.integer(1, 16)
        return {
            "s": 256 * draw.integer(1, 16), "b": draw.integer(2, 4), "h": draw.choice([64, 96, 160]) * a, "a": a,
            "t": draw.choice([2, 4, 8]), "sequence_parallel": sequence_parallel,
        }  # fmt: skip

    return sizes


_FOUR_TOKENS = {"s": 4, "b": 1, "h": 4, "a": 4}
_SMALL = {"s": 10, "b": 2, "h": 13, "a": 2, "t": 3}  # t does not divide

ACTIVATIONS = Exercise(
    "activation_bytes",
    reference=activation_bytes,
    cases=[
        Case(
            "4 tokens, h = 4, 4 heads, one rank; GPT-3",
            {**_FOUR_TOKENS, "t": 1, "sequence_parallel": False},
            fixed=[{**_GPT3, "a": 96, "t": 1, "sequence_parallel": False}],
        ),
        Case(
            "the same on 4 ranks; GPT-3 on 8",
            {**_FOUR_TOKENS, "t": 4, "sequence_parallel": False},
            fixed=[{**_GPT3, "a": 96, "t": 8, "sequence_parallel": False}],
        ),
        Case(
            "the same with sequence parallelism",
            {**_FOUR_TOKENS, "t": 4, "sequence_parallel": True},
            fixed=[{**_GPT3, "a": 96, "t": 8, "sequence_parallel": True}],
        ),
        Case("other models", _a_model(False), hidden=True, fixed=[{**_SMALL, "sequence_parallel": False}]),
        Case(
            "other models, sequence parallelism",
            _a_model(True),
            hidden=True,
            fixed=[{**_SMALL, "sequence_parallel": True}],
        ),
    ],
    mistakes=[
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, b, h, a, t, True),
            "Without sequence parallelism norms, dropouts and the inputs of column layers are whole on every rank: "
            "10 of the 34 bytes.",
        ),
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, b, h, a, t, False),
            "With sequence parallelism the 10 bytes of norms, dropouts and inputs are cut over the sequence as well.",
        ),
        Mistake(
            lambda **given: 2 * activation_bytes(**given),
            "Twice too much: the numbers of the table are bytes already, for 16 bits.",
        ),
        Mistake(_activations(10, 24, 5, scores_cut=False), "Attention scores belong to heads, and heads are divided."),
        Mistake(
            _activations(10, 24, 0),
            "The scores are missing: softmax output, dropout mask and dropout output, 5 a s^2 b.",
        ),
        Mistake(_activations(8, 24), "Dropout masks are bytes too: one at the end of attention, one of the MLP."),
        Mistake(_activations(6, 28), "The input of a column layer is whole on every rank: it is what f copies."),
    ],
    idea="Sort the rows of the table: which tensors belong to some heads or to some features of the MLP, and which are "
    "in a region that the picture shows whole?",
    hint="Add up the column 'bytes' of the table, once for the rows that tp divides and once for the others.",
)

# -------------------------------------------------------------------------------------------- partial gradients

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


def _choose(rule: Callable[[str, bool], bool]) -> Callable[..., list[str]]:
    return lambda names, sequence_parallel: [n for n in names if rule(n, sequence_parallel)]


def _some_names(draw: Draw) -> dict[str, Any]:
    sp, layer = draw.choice([True, False]), draw.integer(1, 9)
    names = [n.replace("layers.0", f"layers.{layer}") for n in draw.random.sample(NAMES, draw.integer(10, 16))]
    return {"names": names, "sequence_parallel": sp}


def _backwards(sequence_parallel: bool) -> dict[str, Any]:
    """Layers of one digit and of two, the last name first, and norms of heads that have a bias."""
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
            _choose(lambda n, sp: _of_tokens(n) or _of_heads(n)),
            "Without sequence parallelism every rank sees all tokens: norms and row biases are complete then.",
        ),
    ],
    idea="Of each name ask two things: does every rank hold the whole of it, and is it used on all tokens and heads?",
    hint="Partial is what is replicated over tp and used on only a part of the work: on this rank's tokens (with "
    "sequence parallelism) or on this rank's heads (always). What is cut over tp is complete.",
)

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    heads: int, groups: int, ffn: int, tp: int, rank: int, layers: int, hidden: int, vocab: int
) -> dict[str, Any]:
    mine = heads // tp
    queries = list(range(rank * mine, (rank + 1) * mine))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden**2 // (8 * hidden) + 1,
    }


def _equal_cut(groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return list(range(rank * groups // tp, rank * groups // tp + groups // tp))


def _cut_groups(groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return list(range(rank * groups // tp, (rank + 1) * groups // tp))


def _first_head(heads: int, groups: int, tp: int, rank: int, **_: int) -> list[int]:
    return [rank * (heads // tp) // (heads // groups)]


def _middle_cut(ffn: int, tp: int, rank: int, **_: int) -> list[list[int]]:
    return [[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]


def _some_model(few: bool) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        groups = draw.choice([1, 2]) if few else draw.choice([8, 16])
        tp = draw.choice([4, 8])
        heads = tp * groups * draw.integer(1, 3) if few else groups * draw.integer(2, 4)
        return {
            "heads": heads, "groups": groups, "tp": tp, "rank": draw.integer(1, tp - 1),
            "layers": draw.integer(2, 96), "hidden": 64 * heads, "vocab": 1024 * draw.integer(30, 250),
            "ffn": 64 * tp * draw.integer(4, 40),
        }  # fmt: skip

    return inputs


# More groups than ranks, and no multiple: a rank's queries use two or three groups, one of them with another rank.
_UNEVEN = {"heads": 24, "groups": 6, "ffn": 1536, "tp": 4, "rank": 1, "layers": 7, "hidden": 1536, "vocab": 32000}
_THREE_GROUPS = {**_UNEVEN, "heads": 48, "groups": 24, "tp": 8, "rank": 2, "hidden": 3072}
_FEW = {"heads": 16, "groups": 2, "ffn": 4096, "tp": 8, "rank": 2, "layers": 12, "hidden": 1024, "vocab": 50304}

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("4 query heads in 2 groups, rank 1 of 2, one layer; Llama-3 70B, rank 5 of 8",
             {"heads": 4, "groups": 2, "ffn": 8, "tp": 2, "rank": 1, "layers": 1, "hidden": 8, "vocab": 12},
             fixed=[{"heads": 64, "groups": 8, "ffn": 28672, "tp": 8, "rank": 5, "layers": 80, "hidden": 8192,
                     "vocab": 128256}]),
        Case("other models", _some_model(few=False), hidden=True, fixed=[_UNEVEN, _THREE_GROUPS]),
        Case("fewer groups than ranks", _some_model(few=True), points=2, hidden=True,
             fixed=[_FEW, {**_FEW, "rank": 6}]),
    ],
    mistakes=[
        *(
            Mistake(
                instead(answers, kv_heads=heads),
                "A rank uses the key/value heads of all its queries: that may be several, and several ranks may use "
                "the same key/value head.",
            )
            for heads in (_equal_cut, _cut_groups, _first_head)
        ),
        Mistake(
            instead(answers, gate_up_rows=_middle_cut),
            "One cut through the stack gives rank 0 only gates. A rank needs the same rows of both halves: two ranges.",
        ),
        Mistake(instead(answers, all_reduces_forward=lambda layers, **_: 2 * layers), "The embedding is summed too."),
        *(
            Mistake(instead(answers, all_reduces_forward=sums), "Forward only: two sums a layer, one for each pair.")
            for sums in (lambda layers, **_: 4 * layers, lambda layers, **_: 4 * layers + 1)
        ),
        Mistake(
            instead(answers, all_reduces_forward=lambda layers, **_: 4 * layers + 2),
            "Forward only: two sums a layer, and one for the embedding.",
        ),
        Mistake(
            instead(answers, logits_over_three=lambda vocab, **_: vocab / 3),
            "A ring all-reduce of n bytes sends twice what an all-gather of n bytes does.",
        ),
        Mistake(
            instead(answers, zero3_sends_less_from=lambda hidden, **_: 3 * hidden + 1),
            "ZeRO-3 moves the weights three times: gathered forward and backward, gradients scattered.",
        ),
        Mistake(
            instead(answers, zero3_sends_less_from=lambda hidden, **_: 4.5 * hidden),
            "With so many tokens both send the same. Asked is the first number with which ZeRO-3 sends less.",
        ),
    ],
    idea="Each entry counts something that you have built: heads of a rank, rows of a stack, sums on the way forward, "
    "elements that travel.",
    hint="query heads: a/t of them from rank*a/t on. key/value heads: q // (a/g) of each. gate and up: rows "
    "r f/t to (r+1) f/t of the first half, and the same rows of the second. Forward: the embedding and "
    "two sums a layer. Ratio: s b V (an all-gather) to 2 * 3 s b. "
    "ZeRO-3: both send the same where 3 * 12 h^2 = 8 b s h; one token more is asked for.",
)  # fmt: skip
