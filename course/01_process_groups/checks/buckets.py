"""Lab 01, gradients that leave early: sums in buckets, each started when it is full, waited for at the end.

The learner's class is tried on a chain of layers with one parameter each, of different sizes, over several steps. What
is asked of time is decided by order, in the one order of all ranks' starts, waits and marks:

| asked                     | how it is seen                                                                        |
|---------------------------|---------------------------------------------------------------------------------------|
| a full bucket leaves      | the backward of each layer multiplies by a number that the rank gets then (`late`):   |
| while backward runs       | what starts before the next number is given cannot have waited for the next gradient  |
| nothing is waited for     | in one trial rank 1 begins its backward when rank 0 has ended its own: a rank that    |
| before `finish()`         | waits there, in whatever way, never ends it; one that only looks does                 |
| nothing piles up          | of three steps, each ends with more tensors and handles alive than the one before,    |
|                           | also two seconds later                                                                |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import sends
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Draw, Exercise

from .ranks import Inputs, parts

# Seconds that rank 1 waits in each step for rank 0's backward, which takes milliseconds. It must be too long in all of
# them: a machine that stands still once decides nothing.
PATIENCE = (0.3, 0.7, 2.0)

WAITS, HOLDS = "waits in backward", "holds what earlier steps have sent"  # marks that the drive sets


def _drive(
    exercise: Any, x: Any, shapes: Any, bucket_size: int, steps: int, apart: Any, part: int, own: Any, group: Any = None
) -> Any:
    import datetime
    import gc
    import time

    import torch as t
    import torch.distributed as dist

    from labkit.process_group import mark

    if own:
        params = [t.zeros_like(grad).requires_grad_() for grad in own]
        reducer = exercise.OverlappedReducer(params, bucket_size, group)
        sum((p * grad).sum() for p, grad in zip(params, own, strict=True)).backward()
        reducer.finish()
        return [[p.grad for p in params]]
    generator = t.Generator().manual_seed(0)
    params = [t.randn(*shape, generator=generator).mul(0.7).to(x.dtype).requires_grad_() for shape in shapes]
    reducer = exercise.OverlappedReducer(params, bucket_size, group)
    store, found, held, waited = dist.distributed_c10d._get_default_store(), [], list[int](), 0
    for step in range(steps):
        h = x.detach().requires_grad_() * (step + 1)
        number = step * (len(params) + 1)
        h.register_hook(lambda grad, number=number: grad * late(number))  # type: ignore[name-defined]  # noqa: F821
        for p in params:
            p.grad, number = None, number + 1
            h = t.tanh(h @ p if p.ndim == 2 else h * p)
            h.register_hook(lambda grad, number=number: grad * late(number))  # type: ignore[name-defined]  # noqa: F821
        loss = h.sum()
        if apart and dist.get_rank(group):
            try:
                store.wait([f"rank 0 has gone back {step}"], datetime.timedelta(seconds=apart[step]))
            except Exception:
                waited += 1
        loss.backward()
        if apart:
            store.set(f"rank 0 has gone back {step}", "")
        reducer.finish()
        found.append([p.grad if p.grad is None else p.grad.detach().clone() for p in params])
        if steps > 2:
            # What a thread of gloo still has in its hands when finish() returns is let go of soon; what the program
            # holds is not.
            for _ in range(40):
                gc.collect()
                alive = sum(isinstance(thing, t.Tensor | dist.Work) for thing in gc.get_objects())
                alive -= sum(p is not None for grads in found for p in grads)
                if not held or alive <= held[-1]:
                    break
                time.sleep(0.05)
            held.append(alive)
    if waited == steps:
        mark("waits in backward")
    if steps > 2 and held == sorted(set(held)):
        mark("holds what earlier steps have sent")
    return found


def _gradients(ranks: Inputs, step: int) -> list[list[torch.Tensor]]:
    """The gradients of every rank for its own inputs, by parameter, before any sum."""
    if ranks[0]["own"]:
        return [r["own"] for r in ranks]
    x = ranks[0]["x"]
    generator = torch.Generator().manual_seed(0)
    shapes = ranks[0]["shapes"]
    params = [torch.randn(*shape, generator=generator).mul(0.7).to(x.dtype).requires_grad_() for shape in shapes]
    found = []
    for r in ranks:
        h = r["x"] * (step + 1)
        for number, p in enumerate(params, step * (len(params) + 1) + 1):
            h = torch.tanh(h @ p if p.ndim == 2 else h * p)
            h.register_hook(lambda grad, factor=r["factors"][number]: grad * factor)
        found.append(list(torch.autograd.grad(h.sum(), params)))
    return found


def _summed(ranks: Inputs) -> list[list[Any]]:
    said: list[list[Any]] = [[] for _ in ranks]
    for step in range(ranks[0]["steps"]):
        own = _gradients(ranks, step)
        for group in parts(ranks):
            total = [sum(of_one) for of_one in zip(*(own[rank] for rank in group), strict=True)]
            for rank in group:
                said[rank].append(total)
    return said


def _goes_on(answer: Answer) -> str | None:
    for rank, one in enumerate(answer.evidence):
        marks = [text for text, _ in one.marks]
        if WAITS in marks:
            return f"rank {rank} waits inside backward(), so nothing is hidden behind computation"
        if HOLDS in marks:
            return f"rank {rank}: after finish() more tensors or handles of earlier steps are still held in every step"
    return None


def _buckets(inputs: dict[str, Any]) -> tuple[list[int], int]:
    """(whether a bucket is full after the gradient of each layer, the last first; parameters left for `finish`)."""
    full, held, left = list[int](), 0, 0
    for shape in reversed(inputs["shapes"]):
        held, left = held + math.prod(shape), left + 1
        full.append(int(held >= inputs["bucket_size"]))
        if full[-1]:
            held = left = 0
    return full, left


def _steps(one: Evidence, inputs: dict[str, Any]) -> list[list[int]]:
    """For each step the moments at which each layer goes back, the last first, and at which all have."""
    layers, moments = len(inputs["shapes"]) + 1, [moment for text, moment in one.marks if text not in (WAITS, HOLDS)]
    return [moments[at : at + layers] for at in range(0, len(moments), layers)]


def _one_launch_a_bucket(answer: Answer) -> str | None:
    full, left = _buckets(answer.inputs[0])
    want = sum(full) + (left > 0)
    for rank, one in enumerate(answer.evidence):
        begins = [0, *(moments[0] for moments in _steps(one, answer.inputs[rank])[1:]), math.inf]
        for step, (low, high) in enumerate(itertools.pairwise(begins), 1):
            if (made := _launched(one, low, high)) != want:
                return f"rank {rank} calls all_reduce {made} times in step {step}; {want} buckets need {want}"
    return None


def _launched(one: Evidence, low: float, high: float) -> int:
    return sum(call.name == "all_reduce" and low <= call.started < high for call in one.calls)


def _at_once(answer: Answer) -> str | None:
    full, _ = _buckets(answer.inputs[0])
    for rank, one in enumerate(answer.evidence):
        for step, moments in enumerate(_steps(one, answer.inputs[rank]), 1):
            for layer, next_layer in enumerate(moments[1:], 1):
                if _launched(one, moments[0], next_layer) < sum(full[:layer]):
                    return (f"rank {rank}, step {step}: a bucket is full after {layer} of {len(full)} gradients, and "
                            "has not left when the next gradient is computed")  # fmt: skip
    return None


def _net(draw: Draw, ranks: int = 2, groups: int = 1) -> Inputs:
    shapes = _chain(draw, draw.integer(4, 6))
    total = sum(math.prod(shape) for shape in shapes)
    sizes = {"shapes": shapes, "bucket_size": draw.integer(total // 4, total // 2), "steps": 2, "apart": (), "own": ()}
    return [
        {"x": draw.tensor(3, shapes[0][0]), **sizes, "factors": _factors(draw, sizes), "part": rank % groups}
        for rank in range(ranks)
    ]


def _factors(draw: Draw, sizes: dict[str, Any]) -> list[float]:
    """Draw for each step a factor for each layer, and one for the input."""
    return [draw.integer(8, 24) / 16 for _ in range(sizes["steps"] * (len(sizes["shapes"]) + 1))]


def _chain(draw: Draw, layers: int) -> list[tuple[int, ...]]:
    """Draw shapes of parameters that can follow each other: matrices, and vectors that scale."""
    width, shapes = draw.integer(2, 6), list[tuple[int, ...]]()
    for layer in range(layers):
        if layer % 3 == 2:
            shapes.append((width,))
        else:
            shapes.append((width, draw.choice([w for w in range(2, 8) if w != width])))
            width = shapes[-1][1]
    return shapes


def _two_groups(draw: Draw) -> Inputs:
    return _net(draw, 4, groups=2)


def _fixed(
    bucket_size: int, *shapes: tuple[int, ...], steps: int = 2, apart: tuple[float, ...] = (), groups: int = 1
) -> Callable[[Draw], Inputs]:
    common = {"shapes": list(shapes), "bucket_size": bucket_size, "steps": steps, "apart": apart, "own": ()}
    return lambda draw: [
        {"x": draw.tensor(2, shapes[0][0]), **common, "factors": _factors(draw, common), "part": rank % groups}
        for rank in range(2 * groups)
    ]


_EXACT = _fixed(32, *[(4, 4)] * 4)  # the second gradient fills a bucket exactly, and nothing is left for finish()
_MIXED = _fixed(20, (3, 5), (5,), (5, 2), (2, 7), (7,), (7, 3))
_ONE = _fixed(10**6, (2, 3), (3,), (3, 2), steps=3, groups=2)  # finish() sends all
_TWO = _fixed(12, (3, 5), (5, 4), (4,), (4, 3), groups=2)  # the one that is tried in float64
_APART = _fixed(16, *[(4, 4)] * 4, steps=len(PATIENCE), apart=PATIENCE)

_TINY = [
    {"x": torch.zeros(0), "shapes": [(2,), (1,)], "bucket_size": 2, "steps": 1, "apart": (), "factors": [], "part": 0,
     "own": [10.0**rank * torch.tensor([1.0, 2.0]), 10.0**rank * torch.tensor([3.0])]}
    for rank in range(2)
]  # fmt: skip

BUCKETS = Exercise(
    "overlap",
    reference=_summed,
    function="OverlappedReducer",
    drive=_drive,
    late="factors",
    group={"group": parts},
    accept=[_goes_on],
    cases=[
        Case("two parameters, with the gradients [1, 2], [3] on rank 0 and [10, 20], [30] on rank 1", _TINY),
        Case("gradients are summed over the ranks of the group, at every step", _two_groups, hidden=True,
             fixed=[_ONE, _TWO]),
        Case("one all-reduce a bucket", _net, hidden=True, fixed=[_EXACT], accept=[
            sends("all_reduce"), _one_launch_a_bucket]),
        Case("full buckets leave while backward still runs", _net, points=2, hidden=True,
             fixed=[_MIXED, _APART], accept=[_at_once]),
    ],
    errors={
        "'NoneType' object has no attribute": "Something is None. A hook of `register_hook` runs before `.grad` is "
        "stored; all_reduce returns a handle only with async_op=True.",
        "deadlock": "The ranks in `group` take part in each sum, all of them and no others.",
    },
    idea="When does a bucket leave, who waits for it, and what happens to the one that is not full at the end?",
    hint="In the hook: add the parameter to the open bucket; once it holds bucket_size elements or more, flatten it "
    "and start all_reduce(async_op=True). finish() starts the last one, waits for all, copies the sums back by each "
    "parameter's own size, and leaves everything ready for the next step.",
)  # fmt: skip
