"""Lab 06, gradients of ZeRO-2: a bucket is reduced and scattered while backward runs, and no whole gradient lasts.

The learner's class is tried on a chain of layers with one parameter each. The backward of each layer multiplies by a
number that the rank gets only then (`late`). The evidence has this moment on the same clock as starts and waits:

| asked                              | how it is seen                                                               |
|------------------------------------|------------------------------------------------------------------------------|
| a full bucket leaves               | its reduce-scatter starts before the next layer's number is given            |
| no hook waits for what has left    | the layer that fills the next bucket has got its number before the wait      |
| no whole gradient lasts            | bytes alive at once: two buckets and the shards; `p.grad` is None afterwards |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from labkit.checks import keeps_alive, peak_at_most, sends, untouched
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Draw, Exercise

from .layout import lay_out

Inputs = list[dict[str, Any]]


def _drive(
    exercise: Any, x: Any, weights: Any, places: Any, buckets: Any, steps: int, idle: Any, part: int, own: Any,
    group: Any = None,
) -> Any:  # fmt: skip
    import torch as t

    params = [w.detach().requires_grad_() for w in weights]
    reducer = exercise.GradientShards(params, places, buckets, group)
    exercise.kept = reducer  # it lives on: what it holds is counted
    found = []
    for step in range(steps):
        if own:
            sum((p * grad).sum() for p, grad in zip(params, own[step], strict=True) if grad is not None).backward()
        else:
            h, number = x.detach().requires_grad_() * (step + 1), step * (len(params) + 1)
            h.register_hook(lambda grad, number=number: grad * late(number))  # type: ignore[name-defined]  # noqa: F821
            for i, p in enumerate(params):
                number += 1
                if i != idle[step]:
                    h = t.tanh(h @ p if p.ndim == 2 else h * p)
                h.register_hook(lambda grad, number=number: grad * late(number))  # type: ignore[name-defined]  # noqa: F821
            h.sum().backward()
            h = None
        shards = reducer.finish()
        left = sum(p.grad is not None for p in params)
        found.append(
            {
                "gradients left on parameters": left,
                "shards": [s.clone() if steps > 1 and t.is_tensor(s) else s for s in shards],
            }
        )
    return found


def _parts(ranks: Inputs) -> list[list[int]]:
    """Ranks of the same `part` are a group."""
    return [[i for i, r in enumerate(ranks) if r["part"] == part] for part in sorted({r["part"] for r in ranks})]


def _gradients(ranks: Inputs, step: int) -> list[list[torch.Tensor]]:
    """The gradients of every rank for its own inputs, by parameter, before any sum."""
    found = []
    for r in ranks:
        if r["own"]:
            mine = zip(r["weights"], r["own"][step], strict=True)
            found.append([torch.zeros_like(w) if grad is None else grad for w, grad in mine])
            continue
        params = [w.clone().requires_grad_() for w in r["weights"]]
        h = (r["x"] * (step + 1)).requires_grad_()
        for i, p in enumerate(params):
            if i != r["idle"][step]:
                h = torch.tanh(h @ p if p.ndim == 2 else h * p)
            factor = r["factors"][step * (len(params) + 1) + 1 + i]
            h.register_hook(lambda grad, factor=factor: grad * factor)
        grads = torch.autograd.grad(h.sum(), params, allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)])
    return found


def _reduced(ranks: Inputs) -> list[list[Any]]:
    """The shards of each rank, step by step."""
    said: list[list[Any]] = [[] for _ in ranks]
    for step in range(ranks[0]["steps"]):
        each = _gradients(ranks, step)
        for group in _parts(ranks):
            total = torch.zeros(ranks[0]["buckets"][-1][1], dtype=each[0][0].dtype)
            for rank in group:
                for place, grad in zip(ranks[0]["places"], each[rank], strict=True):
                    total[place : place + grad.numel()] += grad.flatten()
            parts = [total[start:stop].chunk(len(group)) for start, stop in ranks[0]["buckets"]]
            for me, rank in enumerate(group):
                said[rank].append({"gradients left on parameters": 0, "shards": [of[me] for of in parts]})
    return said


def _bucket_of(inputs: dict[str, Any]) -> list[int]:
    """The bucket of each parameter."""
    ends = [stop for _, stop in inputs["buckets"]]
    return [next(n for n, stop in enumerate(ends) if place < stop) for place in inputs["places"]]


def _full(inputs: dict[str, Any], step: int) -> list[int]:
    """The number of full buckets after the gradient of each layer, the last layer first."""
    of, missing, done, found = _bucket_of(inputs), dict[int, int](), 0, list[int]()
    for bucket in of:
        missing[bucket] = missing.get(bucket, 0) + 1
    for i in reversed(range(len(of))):
        if i != inputs["idle"][step]:
            missing[of[i]] -= 1
            done += missing[of[i]] == 0
        found.append(done)
    return found


def _steps(one: Evidence, inputs: dict[str, Any]) -> list[list[int]]:
    """For each step the moments at which each layer goes back, the last first, and at which all have."""
    layers, moments = len(inputs["weights"]) + 1, [moment for _, moment in one.marks]
    return [moments[at : at + layers] for at in range(0, len(moments), layers)]


def _each_once(answer: Answer) -> str | None:
    for rank, (one, inputs) in enumerate(zip(answer.evidence, answer.inputs, strict=True)):
        layers = len(inputs["weights"]) + 1
        want = [f"late {step * layers + layer}" for step in range(inputs["steps"]) for layer in reversed(range(layers))]
        if [text for text, _ in one.marks] != want:
            return f"rank {rank}: the layers do not go back once each"
    return None


def _one_launch_a_bucket(answer: Answer) -> str | None:
    want = len(answer.inputs[0]["buckets"])
    for rank, one in enumerate(answer.evidence):
        begins = [0, *(moments[0] for moments in _steps(one, answer.inputs[rank])[1:]), math.inf]
        for step, (low, high) in enumerate(itertools.pairwise(begins), 1):
            if (made := sum(low <= call.started < high for call in one.calls)) != want:
                return f"rank {rank} calls reduce_scatter {made} times in step {step}; {want} buckets need {want}"
    return None


def _at_once(answer: Answer) -> str | None:
    for rank, (one, inputs) in enumerate(zip(answer.evidence, answer.inputs, strict=True)):
        for step, moments in enumerate(_steps(one, inputs)):
            for layer, (full, moment) in enumerate(zip(_full(inputs, step), moments[1:], strict=True), 1):
                if sum(moments[0] <= call.started < moment for call in one.calls) < full:
                    return (f"rank {rank}, step {step + 1}: a bucket is full after {layer} of {len(moments) - 1} "
                            "gradients, and has not left when the next gradient is computed")  # fmt: skip
    return None


def _has_a_buckets_time(answer: Answer) -> str | None:
    """Check that a full bucket may travel until the next one is full, and the last until the end of the backward
    pass."""
    for rank, (one, inputs) in enumerate(zip(answer.evidence, answer.inputs, strict=True)):
        for step, moments in enumerate(_steps(one, inputs)):
            full = [0, *_full(inputs, step)]  # before the layer of each moment goes back, and after all have
            for number, call in enumerate(c for c in one.calls if moments[0] <= c.started < moments[-1]):
                fills = next((at for at in range(len(moments) - 1) if full[at + 1] > number + 1), len(moments) - 1)
                where = f"rank {rank}, step {step + 1}: it waits for bucket {number}"
                if call.waited is None or call.waited > moments[fills]:
                    continue
                if call.waited < min(moment for moment in moments if moment > call.started):
                    return (
                        f"{where} as soon as that has left, inside backward(), so nothing is hidden behind computation"
                    )
                return f"{where} before the next bucket is full; until then it may travel, hidden behind computation"
    return None


def _item(ranks: Inputs) -> int:
    return int(ranks[0]["x"].itemsize)


def _shards_and_two_buckets(ranks: Inputs) -> float:
    """The bytes that are allowed: the shards, a bucket on its way, one that fills or leaves, gradients of two
    layers."""
    r, world = ranks[0], len(ranks)
    largest = max(stop - start for start, stop in r["buckets"])
    return _item(ranks) * (r["buckets"][-1][1] / world + 2 * largest + 2 * max(w.numel() for w in r["weights"]))


def _shards(ranks: Inputs) -> float:
    r = ranks[0]
    return _item(ranks) * (r["buckets"][-1][1] / len(ranks) + r["buckets"][0][1]) + 1024


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


def _on_ranks(
    draw: Draw, shapes: Sequence[tuple[int, ...]], bucket_size: int, ranks: int, groups: int = 1, steps: int = 2,
    idle: tuple[int, ...] = (-1, -1), batch: int = 3,
) -> Inputs:  # fmt: skip
    weights = [0.7 * draw.tensor(*shape) for shape in shapes]
    layout = lay_out([w.numel() for w in weights], bucket_size, ranks // groups)
    return [
        {"x": draw.tensor(batch, shapes[0][0]), "weights": [w.clone() for w in weights], **layout, "steps": steps,
         "idle": idle, "part": rank % groups, "own": (),
         "factors": [draw.integer(8, 24) / 16 for _ in range(steps * (len(shapes) + 1))]}
        for rank in range(ranks)
    ]  # fmt: skip


def _net(draw: Draw) -> Inputs:
    shapes = _chain(draw, draw.integer(4, 6))
    total = sum(map(math.prod, shapes))
    return _on_ranks(draw, shapes, draw.integer(total // 4, total // 2), 2)


def _three(draw: Draw) -> Inputs:
    return _on_ranks(draw, _chain(draw, 5), 9, 3)


def _two_groups(draw: Draw) -> Inputs:
    return _on_ranks(draw, _chain(draw, 4), 12, 4, groups=2)


_SQUARE = [(4, 4)] * 6


def _idle(draw: Draw) -> Inputs:
    """Draw steps such that one layer has no gradient in the first step, another none in the second."""
    return _on_ranks(draw, _SQUARE, 32, 2, idle=(1, 4))


def _alone(draw: Draw) -> Inputs:
    """Draw a layer without gradient that is a bucket of its own."""
    return _on_ranks(draw, _SQUARE, 16, 2, idle=(5, 0))


def _exact(draw: Draw) -> Inputs:
    return _on_ranks(draw, _SQUARE, 32, 2)


def _large(draw: Draw) -> Inputs:
    """Draw 48 layers of 2 KiB, eight in each bucket.

    Two buckets and the shards are less than a whole gradient, and less than three buckets, which a program needs that
    keeps gradients on their parameters until a bucket is full.
    """
    return _on_ranks(draw, [(24, 24)] * 48, 8 * 24 * 24, 2, steps=1, batch=1)


_TINY = [
    {"x": torch.zeros(0), "weights": [torch.zeros(2), torch.zeros(1)], **lay_out([2, 1], 2, 2), "steps": 1,
     "idle": (-1,), "part": 0, "factors": [],
     "own": [[10.0**rank * torch.tensor([1.0, 2.0]), 10.0**rank * torch.tensor([3.0])]]}
    for rank in range(2)
]  # fmt: skip
_TWO_STEPS = [
    {"x": torch.zeros(0), "weights": [torch.zeros(2) for _ in range(3)], **lay_out([2, 2, 2], 4, 2), "steps": 2,
     "idle": (1, -1), "part": 0, "factors": [],
     "own": [[None if (step, i) == (0, 1) else 10.0**rank * torch.tensor([1.0, 2.0]) + i for i in range(3)]
             for step in range(2)]}
    for rank in range(2)
]  # fmt: skip


REDUCE = Exercise(
    "reduce_early",
    reference=_reduced,
    function="GradientShards",
    drive=_drive,
    late="factors",
    group={"group": _parts},
    cases=[
        Case("two parameters, with the gradients [1, 2], [3] on rank 0 and [10, 20], [30] on rank 1", _TINY),
        Case("each rank gets its shard of the sum over the group", _two_groups, hidden=True, fixed=[_three]),
        Case("three parameters of 2 in two buckets, two steps; in the first, parameter 1 has no gradient", _TWO_STEPS),
        Case("a parameter without a gradient in this step", _idle, hidden=True, fixed=[_alone]),
        Case("full buckets leave while backward runs, and none is waited for before the next one is full", _net,
             hidden=True, fixed=[_exact], accept=[
                 sends("reduce_scatter"), untouched, _each_once, _one_launch_a_bucket, _at_once, _has_a_buckets_time]),
        Case("no whole gradient lasts", _large, points=2, hidden=True, accept=[
            peak_at_most("room for the shards, two buckets and two gradients (gradients that wait on their parameters "
                         "count; a shard that is a view of its bucket keeps it alive)", _shards_and_two_buckets),
            keeps_alive("room for its shards and one bucket", _shards)]),
    ],
    errors={"never waits": "A message that nobody has waited for may not have arrived: its numbers mean nothing yet.",
            "out of step": "Every rank must send the same buckets in the same order, full or not."},
    idea="When a bucket is full, send it; then wait for the one before, which has had a whole bucket's time; drop it. "
    "Until a bucket is full, where do its gradients lie?",
    hint="In the hook: open the bucket (zeros) with its first gradient, copy the gradient to its place, p.grad = None. "
    "When none is missing: shard = new_empty(size // D), reduce_scatter_tensor(shard, bucket, async_op=True); if "
    "another one travels, wait for that one and drop its bucket. finish() sends what has not left, waits for all, and "
    "begins anew.",
)  # fmt: skip
