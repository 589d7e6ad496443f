"""Lab 12, the capstone: a layout for 1,024 GPUs, judged by the package's own planner.

The fastest layout that a search finds is kept here, not its seconds, so that the rates of a cluster can change without
this file; `tests/course/test_lab12.py` searches again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from labkit.exercises import Answer, Case, Exercise

WORLD, MARGIN, SLACK = 1024, 10, 1.12  # GPUs; GiB that must stay free; times the fastest
GIB = 2**30
FLAGS = (
    "--preset llama3-70b --seq-length {} --global-batch-size {} --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)
SIZES = ("tp", "cp", "pp", "v", "micro", "zero")
FASTEST = {"tp": 4, "cp": 1, "pp": 2, "v": 40, "micro": 1, "zero": 2, "recompute": "none"}


def flags(tokens: int = 8192, batch: int = 512) -> list[str]:
    """The arguments of the run, without its layout."""
    return FLAGS.format(tokens, batch).split()


@functools.cache
def planned(gpus: int = WORLD, tokens: int = 8192, batch: int = 512, **layout: Any) -> Any:
    """The plan of a layout.

    Raises:
        ConfigError: the layout is impossible.
    """
    from minimegatron.planner.cluster import CLUSTERS
    from minimegatron.planner.layouts import Layout
    from minimegatron.planner.planning import plan
    from minimegatron.training.arguments import parse_args

    at = dict(layout)
    schedule = "interleaved" if at["v"] > 1 else "1f1b"
    point = Layout(
        at["tp"], at["cp"], at["pp"], 1, at["tp"], at["v"], schedule, at["micro"], at["recompute"], at["zero"]
    )
    return plan(point.run(parse_args(flags(tokens, batch), reads=False)), gpus, CLUSTERS["h100"])


def wrong_form(value: Any, *more: str) -> str | None:
    """Say what is wrong with the form of a layout that comes with `more` entries."""
    names = {*SIZES, "recompute", *more}
    if not isinstance(value, dict) or set(value) != names:
        return f"a dict with the keys {', '.join(sorted(names))} is asked for"
    if not all(type(value[name]) is int and value[name] >= (name != "zero") for name in SIZES):
        return f"{', '.join(SIZES)} are whole numbers, all but zero 1 or more"
    if value["zero"] not in (1, 2, 3) or value["recompute"] not in ("none", "selective", "full"):
        return "zero is 1, 2 or 3; recompute is none, selective or full"
    if value["v"] > 1 and value["pp"] == 1:
        return "v > 1 needs a pipeline"
    return None


def _judged(judge: Callable[[dict[str, Any], Any], str | None]) -> Callable[[Answer], str | None]:
    def accept(answer: Answer) -> str | None:
        from minimegatron.errors import ConfigError

        if said := wrong_form(answer.value, "left", "largest"):
            return said
        try:
            told = planned(**{name: answer.value[name] for name in (*SIZES, "recompute")})
        except ConfigError as error:
            return f"the package refuses this layout: {error}"
        return judge(answer.value, told)

    return accept


def left_of(told: Any) -> float:
    return (told.cluster.usable - told.bytes) / GIB


def too_large(told: Any) -> str | None:
    """Say that a plan leaves too little memory."""
    left = left_of(told)
    if left >= MARGIN:
        return None
    words = "does not fit" if left < 0 else "fits, with too little left"
    room = f"{told.bytes / GIB:.1f} of {told.cluster.usable / GIB:.1f} GiB for tensors"
    return f"it {words}: {room}, and {MARGIN} must stay free"


def _margin(value: dict[str, Any], told: Any) -> str | None:
    return too_large(told)


def too_slow(told: Any, fastest: Any) -> str | None:
    """Say that a plan leaves too little memory, or is slower than the fastest one by more than the slack."""
    if said := too_large(told):
        return said
    best, seconds = fastest.time.seconds, told.time.seconds
    return None if seconds <= SLACK * best else f"a step takes {seconds / best - 1:.1%} longer than with the fastest"


def _true(value: dict[str, Any], told: Any) -> str | None:
    if said := too_large(told):
        return said
    if isinstance(value["left"], bool) or not isinstance(value["left"], int | float):
        return "left is a number of GiB"
    if not abs(value["left"] - left_of(told)) <= 0.5:
        return "left is not what the plan says of the fullest rank, within 0.5 GiB"
    return None if value["largest"] == told.blame else "largest is not the owner of most bytes of the fullest rank"


CAPSTONE = Exercise(
    "run_1024",
    cases=[
        Case(f"it fits, and {MARGIN} GiB stay free", {}, points=2, accept=[_judged(_margin)]),
        Case("a step takes at most 12 % longer than with the fastest layout of a search", {}, points=2,
             accept=[_judged(lambda value, told: too_slow(told, planned(**FASTEST)))]),
        Case("what you say of its memory is true", {}, accept=[_judged(_true)]),
    ],
    errors={"NameError": "The exercise's cell knows none of the notebook's names, nor `plan_of`: write down the "
                         "numbers that `try_layout` prints."},
    idea="Which part of the waterfall is the largest loss, and which size makes it smaller? Change one at a time.",
    hint="tp 8 is no law: try 4, whose messages are smaller. A short pipeline with many chunks has a small bubble, and "
    "ZeRO-2 makes room for it. cp 2 with micro 2 is nearly as fast as cp 1 with micro 1, and keeps less. `minimegatron "
    "plan --search --top 20` lists layouts; keep one that leaves 10 GiB.",
    seconds=60.0,
)  # fmt: skip
