"""Lab 13, what generation keeps of a sequence: keys and values of every token, or one state."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

Sizes = dict[str, int]


def kept_bytes(pattern: str, s: int, sizes: Sizes) -> dict[str, int]:
    """Layer by layer, and the crossing by counting up."""
    groups, d, heads, p, n, shared, taps, size = sizes.values()
    state = heads * p * n * 4
    state += (taps - 1) * heads * p * size + (taps - 1) * 2 * shared * n * size
    token = groups * d * size * 2
    tokens = 0
    while tokens * token <= state:
        tokens += 1
    of = {"*": s * token, "M": state, "-": 0, "E": 0}
    return {"*": of["*"], "M": state, "model": sum(of[letter] for letter in pattern), "from": tokens}


def _sizes(*numbers: int) -> Sizes:
    return dict(zip(("groups", "d", "heads", "p", "n", "state_groups", "taps", "element_size"), numbers, strict=True))


def _some(draw: Draw) -> dict[str, Any]:
    shared = draw.integer(2, 4)
    sizes = _sizes(draw.integer(1, 8), 16 * draw.integer(2, 8), shared * draw.integer(3, 9), 8 * draw.integer(2, 8),
                   8 * draw.integer(3, 16), shared, draw.integer(3, 6), draw.choice([1, 2, 4]))  # fmt: skip
    pattern = "".join(draw.choice("MM*-E") for _ in range(draw.integer(5, 30)))
    return {"pattern": pattern, "s": draw.integer(3, 200_000), "sizes": sizes}


_EXAMPLE = {"pattern": "MM*-", "s": 100, "sizes": _sizes(1, 4, 2, 3, 5, 1, 3, 2)}
_NEMOTRON = _sizes(8, 128, 128, 64, 128, 8, 4, 2)
_UNEVEN = _sizes(1, 4, 2, 3, 4, 1, 3, 2)  # 152 bytes, a token 16
_EQUAL = _sizes(1, 2, 2, 4, 2, 1, 2, 4)  # 112 bytes, a token 16: equal at 7 tokens, larger from 8 on

KEPT = Exercise(
    "kept_bytes",
    reference=kept_bytes,
    cases=[
        Case("the example: MM*- and 100 tokens", _EXAMPLE),
        Case("Nemotron-H 8B's sizes, M-M* and 1,048,576 tokens", {"pattern": "M-M*", "s": 2**20, "sizes": _NEMOTRON}),
        Case("other patterns and sizes", _some, points=2, hidden=True, fixed=[
            {"pattern": "*E", "s": 5, "sizes": _EQUAL}, {"pattern": "M*M-M*", "s": 11, "sizes": _UNEVEN},
            {"pattern": "-E-", "s": 11, "sizes": _UNEVEN},
            {"pattern": "*M", "s": 1, "sizes": _sizes(3, 8, 6, 2, 5, 2, 4, 1)}]),
    ],
    idea="What does one token leave in an attention layer? And what is in a Mamba-2 layer, however many came?",
    hint="token = 2 groups d element_size; state = 4 heads p n + (taps - 1) (heads p + 2 state_groups n) element_size; "
    "from: the first whole number t with t token > state.",
)  # fmt: skip
