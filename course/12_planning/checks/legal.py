"""Lab 12, all layouts that satisfy the divisibility rules, each once, in any order."""

from __future__ import annotations

import itertools
from typing import Any

from labkit.exercises import Answer, Case, Draw, Exercise

NAMES = ("tp", "cp", "pp", "v", "ep", "etp", "micro")


def broken(model: dict[str, int], gpus: int, node: int, batch: int, layout: tuple[int, ...]) -> str:
    """The first rule that a layout breaks, or ""."""
    tp, cp, pp, v, ep, etp, micro = layout
    experts = model["experts"]
    dp, rest = divmod(gpus, tp * cp * pp)
    if rest or dp < 1:
        return "tp cp pp divides the GPUs"
    rules = {
        "tp is a power of two": tp & (tp - 1) == 0,
        "tp is at most a node": tp <= node,
        "tp divides the heads and the groups": model["heads"] % tp == 0 and model["groups"] % tp == 0,
        "cp is a power of two": cp & (cp - 1) == 0,
        "every rank of cp has 4096 tokens or more": cp == 1 or model["s"] // cp >= 4096,
        "pp v divides the layers": model["layers"] % (pp * v) == 0,
        "ep divides the experts": (experts or 1) % ep == 0,
        "etp is 1 or tp, and 1 without experts": etp in ((1, tp) if experts else (1,)),
        "etp ep pp divides the GPUs": gpus % (etp * ep * pp) == 0,
        "micro is 1, 2, 4 or 8": micro in (1, 2, 4, 8),
        "dp micro divides the batch": batch % (dp * micro) == 0,
    }
    if said := next((rule for rule, kept in rules.items() if not kept), ""):
        return said
    m = batch // (dp * micro)
    return "" if v == 1 or (pp > 1 and m % pp == 0) else "v > 1 needs a pipeline and pp divides the microbatches"


def legal(model: dict[str, int], gpus: int, node: int, batch: int) -> list[tuple[int, ...]]:
    def divisors(n: int) -> list[int]:
        return [k for k in range(1, n + 1) if n % k == 0]

    sides = divisors(gpus)
    vs, experts = divisors(model["layers"]), divisors(model["experts"] or 1)
    found = list[tuple[int, ...]]()
    for tp, pp in itertools.product(sides, sides):
        if gpus % (tp * pp) or model["layers"] % pp or tp > node:
            continue
        for cp, v, ep, etp, micro in itertools.product(divisors(gpus // (tp * pp)), vs, experts, {1, tp}, (1, 2, 4, 8)):
            layout = (tp, cp, pp, v, ep, etp, micro)
            if not broken(model, gpus, node, batch, layout):
                found.append(layout)
    return found


def _same(answer: Answer) -> str | None:
    """Compare as sets, and say which rule a layout breaks, or which values are missing."""
    if not isinstance(answer.value, list | tuple) or not all(
        isinstance(one, list | tuple) and len(one) == len(NAMES) and all(type(n) is int for n in one)
        for one in answer.value
    ):
        return f"a list of layouts is asked for, each seven whole numbers: {', '.join(NAMES)}"
    got, want = {tuple(one) for one in answer.value}, set(legal(**answer.inputs))
    if len(answer.value) != len(got):
        return "a layout is there twice"
    for i, j in itertools.combinations(range(len(NAMES)), 2):
        places = [{i: j, j: i}.get(place, place) for place in range(len(NAMES))]
        if got != want and {tuple(one[place] for place in places) for one in got} == want:
            return f"{NAMES[i]} and {NAMES[j]} have changed places; a layout is ({', '.join(NAMES)})"
    if more := got - want:
        one = min(more)
        rule = broken(**answer.inputs, layout=one) if min(one) > 0 else "all sizes are 1 or more"
        return f"{_many(more)} too many; one of them has {_what(one)}, and breaks a rule: {rule}"
    if missing := want - got:
        return f"{_many(missing)} missing; one of them has {_what(min(missing))}"
    return None


def _many(layouts: set[tuple[int, ...]]) -> str:
    return "1 layout is" if len(layouts) == 1 else f"{len(layouts)} layouts are"


def _what(layout: tuple[int, ...]) -> str:
    sizes = [f"{name} {n}" for name, n in zip(NAMES, layout, strict=True) if n != 1]
    return ", ".join(sizes) or "no size above 1"


def _of(
    layers: int, heads: int, groups: int, s: int, experts: int, gpus: int, node: int, batch: int
) -> dict[str, Any]:  # fmt: skip
    model = {"layers": layers, "heads": heads, "groups": groups, "s": s, "experts": experts}
    return {"model": model, "gpus": gpus, "node": node, "batch": batch}


def _drawn(draw: Draw, experts: bool = False) -> dict[str, Any]:
    gpus, groups = draw.choice([8, 12, 16, 24, 32]), draw.choice([1, 2, 3, 4, 8])
    layers, heads = draw.choice([6, 8, 12, 18]), groups * draw.choice([1, 2, 3, 4])
    s, some = draw.choice([4096, 8192, 16384, 32768]), draw.choice([4, 6, 8]) * experts
    return _of(layers, heads, groups, s, some, gpus, draw.choice([2, 4, 8]), gpus * draw.choice([1, 2, 3, 6]))


_FIXED = [
    _of(12, 24, 8, 16384, 0, 16, 4, 48), _of(12, 12, 12, 65536, 0, 24, 8, 24), _of(8, 6, 3, 4096, 0, 6, 8, 12),
    _of(8, 32, 1, 8192, 0, 8, 8, 8), _of(6, 8, 8, 6144, 0, 12, 8, 60), _of(6, 12, 12, 4096, 0, 12, 6, 12),
    _of(4, 4, 4, 2048, 0, 4, 4, 8), _of(4, 4, 4, 8190, 0, 4, 4, 8),
]  # fmt: skip
_FIXED_EXPERTS = [
    _of(8, 32, 8, 8192, 8, 16, 8, 32), _of(6, 16, 4, 4096, 6, 24, 4, 24), _of(4, 4, 4, 4096, 8, 4, 4, 8),
]  # fmt: skip


LEGAL = Exercise(
    "legal",
    accept=[_same],
    cases=[
        Case("the example: 2 GPUs, 2 layers, a batch of 4", _of(2, 4, 2, 8192, 0, 2, 8, 4)),
        Case("4 GPUs, 2 in a node, 4 layers", _of(4, 2, 2, 8192, 0, 4, 2, 4)),
        Case("2 GPUs, 2 experts, a batch of 1", _of(2, 4, 2, 8192, 2, 2, 2, 1)),
        Case("other clusters and models", _drawn, hidden=True, fixed=_FIXED, draws=3),
        Case("models with experts", lambda draw: _drawn(draw, True), hidden=True, fixed=_FIXED_EXPERTS, draws=3),
    ],
    idea="Loop over all sizes, leave out what breaks a rule; dp and m follow from the rest. Each thing that must be "
    "whole is a remainder that must be 0: there are eight.",
    hint="itertools.product over tp, cp, pp in 1..gpus (with tp cp pp dividing gpus), v in 1..layers, ep in 1..max(1, "
    "experts), etp in {1, tp} or {1}, micro in 1, 2, 4, 8; dp = gpus // (tp cp pp); m = batch // (dp micro); one `if` "
    "for each row of the table.",
)  # fmt: skip
