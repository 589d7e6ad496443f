"""Lab 02, what is computed before anything runs: the bytes and the activations of a layer.

Bytes are what one rank sends when collectives run as rings; activations are those of Korthikanti et al. 2022, 16 bits,
with dropout and stored attention scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake

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
        # One rank sends nothing: no row of its own, or a constant would have its points.
        Case("the same with sequence parallelism; on one rank", {**_HANDFUL, "sequence_parallel": True}, points=2,
             fixed=[{**_GPT3, "t": t, "element_size": 2, "sequence_parallel": True} for t in (8, 1)]),
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
        *(
            Mistake(
                _factor(8, sequence),
                "Sequence parallelism does not send less: an all-gather and a reduce-scatter together send what one "
                "all-reduce does.",
            )
            for sequence in (4, 6)
        ),
        *(
            Mistake(_factor(4, sequence), "This is the forward pass. The backward pass has as many arrows.")
            for sequence in (4, 6)
        ),
        *(
            Mistake(_factor(4, sequence), "A ring all-reduce sends its tensor almost twice: 2 n (t-1)/t.")
            for sequence in (8, 10)
        ),
        Mistake(_factor(4, 5), "Half of it: a layer has two column-row pairs, attention and MLP."),
        Mistake(_factor(10, 10), "With tensor parallelism alone nothing is gathered again: every rank keeps x whole."),
        *(
            Mistake(_factor(8, sequence), "Two all-gathers come on top, of n (t-1)/t each: one for each column layer.")
            for sequence in (12, 14)
        ),
        Mistake(
            _factor(12, 14),
            "The backward pass has twice the products of the forward pass, but as many arrows.",
        ),
        *(
            Mistake(
                lambda s, b, h, t, element_size, sequence_parallel, of_a_part=of_a_part: (
                    (8 + 2 * sequence_parallel - of_a_part * (1 - 1 / t) * sequence_parallel)
                    * s * b * h * element_size * (t - 1) / t
                ),
                "With sequence parallelism you count a gather of one rank's part. n is the whole tensor that comes of "
                "it: s is the whole sequence.",
            )
            for of_a_part in (10, 2)
        ),
        *(
            Mistake(_factor(20, sequence), "The 4h features of the MLP stay on their ranks: every arrow carries h.")
            for sequence in (20, 25, 30)
        ),
        Mistake(lambda **given: bytes_per_layer(**given) * given["t"], "This is what all t ranks send together."),
        Mistake(
            lambda element_size, **rest: bytes_per_layer(element_size=1, **rest),
            "These are elements: a message has element_size bytes for each.",
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
        Mistake(_factor(8, 5), "With sequence parallelism this is one way only: the backward pass has as many arrows."),
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
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, b, h, a, t, not sequence_parallel),
            "The flag is taken the wrong way round: *without* sequence parallelism 10 of the 34 bytes are whole.",
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
        *(
            Mistake(
                lambda s, b, h, a, t, sequence_parallel, kept=kept: (
                    activation_bytes(s, b, h, a, t, sequence_parallel)
                    + sequence_parallel * kept * s * b * h * (1 - 1 / t)
                ),
                text,
            )
            for kept, text in (
                (
                    4,
                    "You keep the inputs of the column layers whole. With sequence parallelism a rank keeps its own "
                    "tokens of them, and gathers them again.",
                ),
                (6, "With sequence parallelism more is cut by tokens than norms: all that lies between the pairs."),
                (
                    8,
                    "With sequence parallelism more is cut by tokens than dropout masks: all that lies between the "
                    "pairs.",
                ),
            )
        ),
        *(
            Mistake(
                _activations(whole, 34 - whole),
                "The input of a row layer is cut by features: a rank has the "
                "results of its own heads, or of its own features of the MLP.",
            )
            for whole in (12, 18, 20)
        ),
        Mistake(_activations(26, 8), "The GELU works on this rank's features of the MLP: its input is cut."),
        Mistake(
            _activations(8, 26),
            "The dropouts stand behind the sum, where every rank has the whole tensor: their "
            "masks are not cut by features.",
        ),
        Mistake(
            _activations(8, 24, 2),
            "Dropout is missing: two masks of 1 byte, and for the scores its mask and its output.",
        ),
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, 1, h, a, t, sequence_parallel),
            "You count one sequence: a batch has b of them.",
        ),
        Mistake(
            lambda a, h, **given: activation_bytes(a=h / 128, h=h, **given),  # type: ignore[arg-type]
            "You count heads of 128 features; a is the number of heads.",
        ),
        Mistake(
            lambda **given: given["t"] * activation_bytes(**given),
            "This is what all t ranks keep together.",
        ),
        Mistake(lambda **given: activation_bytes(**given) / 2, "Half of it: the table is in bytes already."),
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, b, h, a, t, sequence_parallel) / (s * b * h),
            "These are bytes per s b h: multiply by s b h.",
        ),
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: (
                activation_bytes(s, b, h, 0, t, sequence_parallel) + 5 * a * s / h / t
            ),
            "The row of the scores is per s b h, too: 5 a s/h is multiplied by s b h.",
        ),
        *(
            Mistake(
                lambda s, b, h, a, t, sequence_parallel, less=less: (
                    activation_bytes(s, b, h, a, t, sequence_parallel)
                    + 5 * a * s * s * b / t * (less(s, b, t, sequence_parallel) - 1)
                ),
                text,
            )
            for less, text in (
                (lambda s, b, t, sp: 1 / b, "You count the scores of one sequence: a batch has b of them."),
                (lambda s, b, t, sp: 1 / t, "The scores are divided twice: they belong to heads, and a rank has a/t."),
                (
                    lambda s, b, t, sp: 1 / t if sp else 1,
                    "The scores are divided twice: tokens are whole within attention, and only the heads are divided.",
                ),
            )
        ),
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: (
                activation_bytes(s, b, h, a, 1, False) / (t if sequence_parallel else 1)
            ),
            "Tensor parallelism alone divides nothing here. Which rows of the table are cut by features?",
        ),
    ],
    idea="Sort the rows of the table: which tensors belong to some heads or to some features of the MLP, and which are "
    "in a region that the picture shows whole?",
    hint="Add up the column 'bytes' of the table, once for the rows that tp divides and once for the others.",
)
