"""Lab 03, what is computed before anything runs: the bubble, and what it means for a model of your own.

Everything follows from one picture: a rank works m*v steps of length 1/v, and waits p-1 of them while the pipeline
fills and drains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

# --------------------------------------------------------------------------------------------------- the bubble


def bubble(p: int, m: int, v: int) -> float:
    """Idle time over work, with p ranks, m microbatches, and v chunks on each rank."""
    return (p - 1) / (m * v)


def _sizes(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 16)
    return {"p": p, "m": p * draw.integer(1, 12), "v": draw.integer(1, 4)}


BUBBLE = Exercise(
    "bubble",
    reference=bubble,
    cases=[
        Case("2 ranks, 2 microbatches: the table by hand", {"p": 2, "m": 2, "v": 1}),
        Case("the same with 2 chunks a rank", {"p": 2, "m": 2, "v": 2}),
        Case("one rank never waits", {"p": 1, "m": 8, "v": 1}),
        Case(
            "other pipelines",
            _sizes,
            points=2,
            hidden=True,
            fixed=[
                {"p": 4, "m": 8, "v": 1},
                {"p": 4, "m": 8, "v": 2},
                {"p": 4, "m": 6, "v": 1},
                {"p": 7, "m": 7, "v": 3},
                {"p": 2, "m": 5, "v": 1},
                {"p": 3, "m": 1, "v": 1},
                {"p": 5, "m": 10, "v": 4},
            ],
        ),
    ],
    mistakes=[
        Mistake(lambda p, m, v: (p - 1) / m, "With v chunks a rank, filling and draining take steps of a v-th."),
        Mistake(
            lambda p, m, v: (p - 1) / v / (m + (p - 1) / v),
            "This is the share of the whole time. Asked is idle time over *work*: divide by the work alone.",
        ),
        Mistake(
            lambda p, m, v: (p - 1) / (m + p - 1),
            "This is the share of the whole time, with one chunk. Asked is idle time over *work*: divide by the work.",
        ),
        Mistake(
            lambda p, m, v: (p - 1) / m if v == 1 else 2 * (p - 1) / (m * v),
            "With chunks you count each hop twice. The warm-up is longer then, but the pipeline fills over p-1 hops.",
        ),
        Mistake(lambda p, m, v: p / (m * v), "The first rank is p-1 steps from the last, not p."),
        Mistake(
            lambda p, m, v: (p - 1) / (3 * v * m),
            "You count 1 step of waiting a hop: a forward is 1, but a backward "
            "takes 2, and the pipeline drains over as many hops as it fills.",
        ),
        Mistake(
            lambda p, m, v: (p * v - 1) / (v * m),
            "With chunks the pipeline has more stages, but it fills when the "
            "first microbatch has reached the last *rank*.",
        ),
        *(
            Mistake(
                lambda p, m, v, digits=digits: round((p - 1) / (v * m), digits),
                "Close: this is rounded. Return the number as it is.",
            )
            for digits in range(5, 0, -1)
        ),
        Mistake(
            lambda p, m, v: 100 * (p - 1) / (v * m), "That is the bubble in percent. Asked is the fraction itself."
        ),
        Mistake(lambda p, m, v: (p - 1) / (m * v * v), "v is counted twice here: a hop takes 1/v as long, once."),
        *(
            Mistake(lambda p, m, v, number=number: number, "This is the same number for every pipeline.")
            for number in (0.5, 0.0, 1.0, 7 / 8, 7 / 15)
        ),
        Mistake(lambda p, m, v: v * (p - 1) / m, "Chunks make the bubble larger here: a hop takes v times as long."),
        Mistake(lambda p, m, v: 3 * (p - 1) / v, "These are the idle steps alone. Asked is idle time over work."),
        Mistake(lambda p, m, v: m * v / (p - 1) if p > 1 else 0.0, "This is work over idle time: the other way round."),
        Mistake(lambda p, m, v: m * v / (m * v + p - 1), "This is the share of all time in which a rank works."),
        Mistake(
            lambda p, m, v: p * (p - 1) / (m * v),
            "This is the idle time of all ranks over the work of one: take one rank.",
        ),
        Mistake(
            lambda p, m, v: (p - 1) / (p * m * v),
            "This is the idle time of one rank over the work of all: take one rank.",
        ),
        Mistake(lambda p, m, v: (p - 1) / (m + v - 1), "v is added to m here. Chunks do not add microbatches."),
        Mistake(
            lambda p, m, v: (p - 1) // v / m, "You divide whole numbers and lose the remainder: a bubble is a fraction."
        ),
    ],
    idea="How long does the last rank wait before its first action, and how long after its last one?",
    hint="A rank works 3m steps. While the pipeline fills and drains it waits for p-1 forwards and p-1 backwards, "
    "3(p-1) steps; with v chunks each of them is 1/v as long. Idle time over work is the quotient.",
)

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    p: int, m: int, v: int, layers: int, tokens: int, hidden: int, kept_bytes_per_token_and_layer: int
) -> dict[str, Any]:
    idle = Fraction(p - 1, v * m)
    warmup = min(m * v, p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p)
    kept = min(m * v, warmup + 1)
    per_chunk = layers // (p * v) * tokens * kept_bytes_per_token_and_layer
    return {
        "idle_share": float(idle / (1 + idle)),
        "microbatches_for_5_percent": _fewest(p, v),
        "kept_bytes_on_rank_0": kept * per_chunk,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


def _fewest(p: int, v: int, wanted: Fraction = Fraction(1, 20), in_groups: bool = True) -> int:
    """The smallest number of microbatches with at most this bubble; with chunks a multiple of p, as `interleaved`
    requires."""
    fewest = math.ceil((p - 1) / (v * wanted))
    return fewest + -fewest % p if v > 1 and in_groups else fewest


def _above(number: int, p: int, v: int) -> int:
    """The first allowed number of microbatches above `number`."""
    return number + 1 + (-(number + 1) % p if v > 1 else 0)


def _few(**changes: Any) -> Callable[..., dict[str, Any]]:
    return instead(answers, microbatches_for_5_percent=lambda p, v, **_: _fewest(p, v, **changes))


def _rounded_down(p: int, v: int, **_: Any) -> int:
    fewest = 20 * (p - 1) // v
    return fewest + -fewest % p if v > 1 else fewest


def _a_run(draw: Draw) -> dict[str, Any]:
    p, v = draw.choice([2, 3, 4, 6, 8]), draw.choice([1, 2, 3, 4])
    return {
        "p": p, "m": p * draw.integer(1, 8), "v": v, "layers": p * v * draw.integer(1, 4),
        "tokens": 1024 * draw.integer(1, 8), "hidden": 256 * draw.integer(4, 32),
        "kept_bytes_per_token_and_layer": 34 * 256 * draw.integer(4, 32),
    }  # fmt: skip


def _all_kept(p: int, m: int, layers: int, tokens: int, kept_bytes_per_token_and_layer: int, **_: Any) -> int:
    return m * (layers // p) * tokens * kept_bytes_per_token_and_layer


def _times(key: str, factor: Callable[..., Fraction | float], hint: str) -> Mistake:
    """A mistake in which the number `key` is this factor of the right one: a factor is missing, or one too many."""

    def wrong(**run: Any) -> dict[str, Any]:
        right = answers(**run)
        value = Fraction(right[key]) * Fraction(factor(**run))
        return {**right, key: value.numerator if value.denominator == 1 else float(value)}

    return Mistake(wrong, hint)


_GPT3 = {
    "p": 8, "m": 64, "v": 1, "layers": 96, "tokens": 2048, "hidden": 12288,
    "kept_bytes_per_token_and_layer": 34 * 12288 // 8,
}  # fmt: skip

_BY_HAND = {
    "p": 3, "m": 5, "v": 1, "layers": 6, "tokens": 7, "hidden": 11, "kept_bytes_per_token_and_layer": 13,
}  # fmt: skip

_RUN = {"layers": 72, "tokens": 3, "hidden": 5, "kept_bytes_per_token_and_layer": 7}
_RUNS = [
    {"p": 2, "m": 4, "v": 3, **_RUN},  # 20/3 microbatches: 7, in groups of 2 are 8
    {"p": 2, "m": 4, "v": 9, **_RUN},  # 20/9 are 2.2: 3, in groups of 2 are 4
    {"p": 3, "m": 3, "v": 3, **_RUN},  # 40/3: 14, in groups of 3 are 15; 9 slots are fewer than warm-up + 1
    {"p": 6, "m": 12, "v": 3, **_RUN},  # 100/3: 34, in groups of 6 are 36
    {"p": 4, "m": 4, "v": 2, **_RUN},  # 30, in groups of 4 are 32; 8 slots
    {"p": 4, "m": 3, "v": 1, **_RUN},  # fewer microbatches than ranks
    {"p": 6, "m": 60, "v": 1, **_RUN},  # 100 is no multiple of 6, and need not be one
]


def _kept(chunks: Callable[[int, int, int], int], of: Callable[[int, int], int]) -> Callable[..., dict[str, Any]]:
    """A mistake with another number of chunks, each of layers/of(p, v)."""

    def kept(p: int, m: int, v: int, layers: int, tokens: int, kept_bytes_per_token_and_layer: int, **_: Any) -> int:
        return chunks(p, m, v) * (layers // of(p, v)) * tokens * kept_bytes_per_token_and_layer

    return instead(answers, kept_bytes_on_rank_0=kept)


def _ahead(p: int, v: int) -> int:
    return p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p


def _at_borders(borders: Callable[[int, int], int], hint: str) -> Mistake:
    return _times("bytes_between_ranks", lambda p, v, **_: Fraction(borders(p, v), p * v - 1), hint)


_SHARE, _KEPT, _SENT = "idle_share", "kept_bytes_on_rank_0", "bytes_between_ranks"
_FACTORS = [
    _times(_SHARE, lambda **_: 100, "The idle share is in percent here; asked is the fraction itself."),
    _times(_KEPT, lambda hidden, **_: hidden, "The kept bytes are multiplied by the hidden size, which is in them."),
    _times(_KEPT, lambda tokens, **_: Fraction(1, tokens), "These are the bytes for one token of a microbatch."),
    _times(_KEPT, lambda m, **_: Fraction(1, m), "A microbatch has `tokens` tokens; they are not shared by m again."),
    _times(_SENT, lambda **_: 2, "These are twice the bytes: a number has 2 bytes, and a message counts once, where it "
           "is sent."),
    _times(_SENT, lambda **_: Fraction(1, 2), "This is half of the bytes: activations go forward *and* gradients come "
           "back, and a number in bf16 has 2 bytes."),
    _times(_SENT, lambda m, **_: Fraction(1, m), "These are the bytes of one microbatch; a batch has m of them."),
    _times(_SENT, lambda hidden, **_: Fraction(1, hidden), "These are the bytes of one number a token."),
    _times(_SENT, lambda tokens, **_: Fraction(1, tokens), "These are the bytes of one token of each microbatch."),
    _times(_SENT, lambda p, **_: Fraction(1, p), "These are the bytes of one rank; asked are those of all borders."),
    _times(_SENT, lambda hidden, **run: Fraction(run["kept_bytes_per_token_and_layer"], 2 * hidden),
           "What a layer keeps stays on its rank; what travels is one activation."),
    _at_borders(lambda p, v: p - 1, "With v chunks a microbatch crosses p*v - 1 borders, not p - 1."),
    _at_borders(lambda p, v: p * v, "There are p*v stages here, and one border fewer."),
    _at_borders(lambda p, v: v * (p - 1), "Between two chunks a microbatch goes from the last rank back to the first: "
                "that is a border, too."),
    _at_borders(lambda p, v: 1, "These are the bytes of one border; asked are those of all borders together."),
]  # fmt: skip


QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("3 stages, 5 microbatches: by hand", _BY_HAND),
        Case("GPT-3 on 8 stages with 4 chunks a rank", {**_GPT3, "v": 4}),
        Case("other runs", _a_run, points=2, hidden=True, fixed=[_GPT3, *_RUNS]),
    ],
    mistakes=[
        Mistake(
            instead(answers, idle_share=lambda p, m, v, **_: (p - 1) / (v * m)),
            "That is idle time over work, the bubble. Asked is the part of *all* time, work and idle time together.",
        ),
        *(
            Mistake(
                instead(answers, idle_share=lambda p, m, v, n=digits, **_: round((p - 1) / (v * m + p - 1), n)),
                "The idle share is rounded here. Return the number as it is.",
            )
            for digits in (5, 4, 3, 2, 1)
        ),
        Mistake(
            instead(answers, idle_share=lambda p, m, **_: (p - 1) / (m + p - 1)),
            "That is the idle share with one chunk a rank.",
        ),
        Mistake(
            _kept(lambda p, m, v: min(m * v, _ahead(p, v) + 1), lambda p, v: 1),
            "That is what all layers together keep. A chunk of rank 0 has layers/p of them, and with v > 1 less still.",
        ),
        Mistake(
            instead(answers, kept_bytes_on_rank_0=_all_kept),
            "That is GPipe's memory: all m microbatches. 1F1B goes back earlier.",
        ),
        Mistake(
            _few(in_groups=False),
            "With chunks the microbatches go in groups of p (cell `interleaved`): the fewest is a multiple of p.",
        ),
        Mistake(
            instead(answers, microbatches_for_5_percent=_rounded_down),
            "That is rounded down: with so few the bubble is a little above 0.05.",
        ),
        Mistake(
            instead(answers, microbatches_for_5_percent=lambda p, v, **_: (n := _fewest(p, v)) + -n % p),
            "With one chunk any number of microbatches will do: only chunks want a multiple of p.",
        ),
        Mistake(
            instead(answers, microbatches_for_5_percent=lambda p, v, **_: _above(20 * (p - 1) // v, p, v)),
            "At *most* 0.05: a bubble of exactly 0.05 is small enough.",
        ),
        Mistake(
            instead(answers, microbatches_for_5_percent=lambda p, v, **_: _above(20 * (p - 1) - 1, p, v)),
            "That is the number for one chunk. With v chunks the bubble is smaller already.",
        ),
        Mistake(
            instead(
                answers, microbatches_for_5_percent=lambda p, v, **_: (n := _fewest(p, v, in_groups=False)) - n % p
            ),
            "That is rounded down to a multiple of p: with so few the bubble is above 0.05.",
        ),
        Mistake(
            instead(
                answers,
                microbatches_for_5_percent=lambda p, v, **_: (n := _fewest(p, v)) + -n % (p * v if v > 1 else 1),
            ),
            "That is a multiple of p*v. The groups have p microbatches, each of which passes all chunks.",
        ),
        Mistake(
            _few(wanted=Fraction(1, 19)),
            "The *bubble* is to be at most 0.05, idle time over work; that is not 5 percent of all the time.",
        ),
        *(
            Mistake(
                _kept(chunks, lambda p, v: p * v),
                "A batch has no more than m*v chunks of activations, also where the warm-up would keep more.",
            )
            for chunks in (
                lambda p, m, v: _ahead(p, v) + 1,
                lambda p, m, v: min(m, _ahead(p, v) + 1),
            )
        ),
        *(
            Mistake(
                _kept(chunks, lambda p, v: p * v),
                "With chunks rank 0 warms up otherwise than in plain 1F1B: look at your `interleaved`.",
            )
            for chunks in (lambda p, m, v: min(m * v, p), lambda p, m, v: min(m, p) * v)
        ),
        Mistake(
            _kept(lambda p, m, v: min(m * v, _ahead(p, v)), lambda p, v: p * v),
            "That is the warm-up alone. Before the first backward comes one more forward.",
        ),
        Mistake(
            _kept(lambda p, m, v: min(m * v, 2 * (p - 1) + (v - 1) * p + 1), lambda p, v: p * v),
            "Plain 1F1B warms up with p - 1 for one chunk; the factor 2 belongs to interleaving.",
        ),
        Mistake(
            _kept(lambda p, m, v: min(m * v, _ahead(p, v) + 1), lambda p, v: p),
            "A chunk is layers/(pv) layers, not all layers of the rank.",
        ),
        *_FACTORS,
    ],
    idea="Work out the run by hand below the questions first, then change one of its numbers at a time.",
    hint="bubble = (p-1)/(vm). Its share of all time is bubble / (1 + bubble). Rank 0 keeps warm-up + 1 chunks of "
    "layers/(pv) layers, and never more than m*v chunks. The fewest microbatches: 20(p-1)/v, rounded up, with "
    "chunks to a multiple of p. A microbatch crosses pv - 1 borders, there and back, 2 bytes a number.",
)
