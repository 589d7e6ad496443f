"""Lab 12, the capstone's second half: fewer GPUs, longer sequences, another card, selective recompute.

The planner judges the learner's numbers over the learner's own layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Answer, Case, Exercise

from .capstone import MARGIN, SIZES, left_of, planned, too_large, too_slow, wrong_form

LONGER = {"tokens": 16_384, "batch": 256}
FASTEST_LONGER = {"tp": 8, "cp": 1, "pp": 1, "v": 1, "micro": 1, "zero": 3, "recompute": "none"}
BATCH, NEAR, GIB = 512, 0.5, 2**30
NAMES = ("layout", "half", "fewest", "selective", "reserve", "longer")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fields(value: Any) -> str | None:
    """Say what is wrong with the form of an answer."""
    if not isinstance(value, dict) or set(value) != set(NAMES):
        return f"a dict with the keys {', '.join(NAMES)} is asked for"
    for name in ("layout", "longer"):
        if said := wrong_form(value[name]):
            return f"{name}: {said}"
    half = value["half"]
    if not isinstance(half, dict) or set(half) != {"seconds", "left"} or not all(map(_number, half.values())):
        return "half is a dict of two numbers, seconds and left"
    if not _number(value["fewest"]) or value["fewest"] % 1 or value["fewest"] < 1:
        return "fewest is a whole number of GPUs"
    return None if _number(value["selective"]) and _number(value["reserve"]) else "selective and reserve are numbers"


def _judged(judge: Callable[[dict[str, Any], dict[str, Any]], str | None]) -> Callable[[Answer], str | None]:
    """Judge an answer whose own layout keeps the margin; `judge` gets the answer and that layout."""

    def accept(answer: Answer) -> str | None:
        from minimegatron.errors import ConfigError

        if said := _fields(answer.value):
            return said
        layout = {name: answer.value["layout"][name] for name in (*SIZES, "recompute")}
        try:
            if said := too_large(planned(**layout)):
                return f"your layout of 1,024 GPUs: {said}"
            return judge(answer.value, layout)
        except ConfigError as error:
            return f"the package refuses this layout: {error}"

    return accept


def _seconds(value: dict[str, Any], layout: dict[str, Any]) -> str | None:
    told, before, want = value["half"]["seconds"], planned(**layout).time.seconds, planned(512, **layout).time.seconds
    if abs(told - want) <= 0.01 * want:
        return None
    if abs(told - 2 * before) <= 0.01 * before:
        return "seconds is twice that of 1,024 GPUs; one part of the step does not grow with a rank's microbatches"
    if layout["zero"] == 3 and told > want:
        return "seconds: the plan says less; with ZeRO-3, how many latencies has a ring of half as many ranks?"
    return f"seconds: the plan says {'more' if want > told else 'less'}"


def _left(value: dict[str, Any], layout: dict[str, Any]) -> str | None:
    told, before, want = value["half"]["left"], left_of(planned(**layout)), left_of(planned(512, **layout))
    if abs(told - want) <= NEAR:
        return None
    if abs(told - before) <= NEAR:
        return "left is that of 1,024 GPUs; what ZeRO shares out has half as many ranks now"
    return f"left: the plan says {'more' if want > told else 'less'}"


def _fewest(value: dict[str, Any], layout: dict[str, Any]) -> str | None:
    gpus, model_ranks, micro = int(value["fewest"]), layout["tp"] * layout["cp"] * layout["pp"], layout["micro"]
    dp, rest = divmod(gpus, model_ranks)
    if rest or not dp:
        return f"fewest: {gpus} GPUs are no multiple of tp {layout['tp']} · cp {layout['cp']} · pp {layout['pp']}"
    if BATCH % (dp * micro):
        cut = f"can a batch of {BATCH} samples be cut for them, in microbatches of {micro}?"
        return f"fewest: on {gpus} GPUs dp is {dp}; {cut}"
    if left_of(planned(gpus, **layout)) < MARGIN - NEAR:
        return f"fewest: on {gpus} GPUs fewer than {MARGIN} GiB stay free; what ZeRO shares out has fewer ranks there"
    less = max((n for n in range(1, dp) if BATCH % (n * micro) == 0), default=0) * model_ranks
    enough = less and left_of(planned(less, **layout)) >= MARGIN + NEAR
    return f"fewest: on fewer GPUs than {gpus} it runs, too, and {MARGIN} GiB stay free" if enough else None


def _selective(value: dict[str, Any], layout: dict[str, Any]) -> str | None:
    none, again = (planned(**{**layout, "recompute": how}).bytes for how in ("none", "selective"))
    want = (none - again) / GIB
    if abs(value["selective"] - want) <= NEAR:
        return None
    if value["selective"] > NEAR:
        return "selective: it frees less; are there scores that a layer with flash attention keeps?"
    return "selective: it takes more; with cp, what does a ring give back that is needed to compute attention again?"


def _reserve(value: dict[str, Any], layout: dict[str, Any]) -> str | None:
    told = planned(**layout)
    grows = left_of(told) - MARGIN
    if abs(value["reserve"] - told.cluster.reserve / GIB - grows) <= NEAR:
        return None
    if abs(value["reserve"] - grows) <= NEAR:
        return "reserve: by so much it may grow; the whole reserve is asked for"
    return f"reserve is not the one with which {MARGIN} GiB stay free"


def _longer(value: dict[str, Any], layout: dict[str, Any]) -> str | None:
    told = planned(**LONGER, **{name: value["longer"][name] for name in (*SIZES, "recompute")})
    said = too_slow(told, planned(**LONGER, **FASTEST_LONGER))
    return said and f"longer: {said}"


CHANGED = Exercise(
    "changed",
    cases=[
        Case("512 GPUs: the seconds of a step", {}, accept=[_judged(_seconds)]),
        Case("512 GPUs: the GiB that stay free", {}, accept=[_judged(_left)]),
        Case("the fewest GPUs", {}, accept=[_judged(_fewest)]),
        Case("what selective recompute frees", {}, accept=[_judged(_selective)]),
        Case("the largest reserve of a card", {}, accept=[_judged(_reserve)]),
        Case("16,384 tokens: 10 GiB stay free, and a step takes at most 12 % longer than with the fastest layout", {},
             accept=[_judged(_longer)]),
    ],
    errors={"NameError": "The exercise's cell knows none of the notebook's names: write down the numbers."},
    idea="Half of the GPUs, half of dp. What comes once for each microbatch, what once a step? What is shared out over "
    "dp, and which dp divides the batch? At 16 k: which size restores a rank's tokens?",
    hint="seconds = 2 (all - once) + once, where bubble, gradients and weights come once: the bubble is p - 1 passes "
    "of a chunk. (With ZeRO-3, rings of half as many ranks also have half of the latencies: plan it.) left: main "
    "parameters and moments double, with ZeRO-2 gradients, too, with ZeRO-3 also parameters. fewest: halve dp, and "
    "these bytes double, as long as 10 GiB stay free. reserve = 4 + left - 10. selective: plan both, and subtract. "
    "longer: half of micro, or twice cp.",
    seconds=60.0,
)  # fmt: skip
