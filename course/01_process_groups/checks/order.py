"""Lab 01, collectives in one order: buckets of ranks whose gradients become ready in different orders, or not at all.

A step is given by the gradients of each rank and the order in which they become ready there: parameters stand in a
chain of sums, and backward walks it from its end. Collectives have no names, the k-th of one rank meets the k-th of the
others; so buckets that are filled or started by arrival are summed with other buckets.

| asked                   | how it is seen                                                                          |
|-------------------------|-----------------------------------------------------------------------------------------|
| one order on all ranks  | the sums, where orders differ and gradients are missing                                 |
| one all-reduce a bucket | the number of all-reduces of each step, on each rank                                    |
| still early             | in the usual order full buckets have left when the next gradient is ready               |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labkit.checks import sends
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Draw, Exercise

from .ranks import Inputs, parts

BEGINS, READY, OVER = "backward begins", "the next gradient", "backward is over"  # marks that the drive sets
Steps = list[list[int]]  # for each step the numbers of the parameters with a gradient, in the order of its arrival


def _drive(exercise: Any, grads: Any, arrive: Any, bucket_size: int, part: int, group: Any = None) -> Any:
    import torch as t

    from labkit.process_group import mark

    params = [t.zeros_like(grad).requires_grad_() for grad in grads[0]]
    reducer = exercise.OrderedReducer(params, bucket_size, group)
    found = []
    for own, order in zip(grads, arrive, strict=True):
        for p in params:
            p.grad = None
        h = t.zeros((), dtype=own[0].dtype, requires_grad=True) * 1
        for i in reversed(order):
            h.register_hook(lambda _: mark("the next gradient"))
            h = h + (params[i] * own[i]).sum()
        mark("backward begins")
        h.backward()
        mark("backward is over")
        reducer.finish()
        found.append([p.grad if p.grad is None else p.grad.detach().clone() for p in params])
    return found


def _summed(ranks: Inputs) -> list[list[list[torch.Tensor]]]:
    """The sums of each step; a gradient that a rank does not have counts as zeros."""
    said: list[Any] = [None] * len(ranks)
    for group in parts(ranks):
        steps = []
        for step, own in enumerate(ranks[group[0]]["grads"]):
            sums = [torch.zeros_like(grad) for grad in own]
            for r in group:
                for i in ranks[r]["arrive"][step]:
                    sums[i] = sums[i] + ranks[r]["grads"][step][i]
            steps.append(sums)
        for r in group:
            said[r] = steps
    return said


def _full(inputs: dict[str, Any]) -> tuple[list[int], int]:
    """(How many buckets are full after each gradient, the last parameter first; the number of buckets.)"""
    held, full = 0, [0]
    for grad in reversed(inputs["grads"][0]):
        held += grad.numel()
        full.append(full[-1] + (held >= inputs["bucket_size"]))
        held = 0 if held >= inputs["bucket_size"] else held
    return full[1:], full[-1] + (held > 0)


def _moments(one: Evidence, text: str) -> list[int]:
    return [moment for said, moment in one.marks if said == text]


def _one_a_bucket(answer: Answer) -> str | None:
    for rank, inputs in enumerate(answer.inputs):
        want = _full(inputs)[1] * len(inputs["grads"])
        if (made := answer.evidence[rank].count("all_reduce")) != want:
            steps = len(inputs["grads"])
            return f"rank {rank} calls all_reduce {made} times in {steps} steps; its buckets need {want}"
    return None


def _early(answer: Answer) -> str | None:
    for rank, inputs in enumerate(answer.inputs):
        one, (full, _) = answer.evidence[rank], _full(inputs)
        starts = [call.started for call in one.calls if call.name == "all_reduce"]
        for step, (begin, over) in enumerate(zip(_moments(one, BEGINS), _moments(one, OVER), strict=True), 1):
            ready = [moment for moment in _moments(one, READY) if begin <= moment < over]
            for number, moment in enumerate(ready[1:], 1):  # when the gradient after it is there
                if sum(begin <= start < moment for start in starts) < full[number - 1]:
                    return (f"rank {rank}, step {step}: a bucket is full after {number} of {len(full)} gradients, and "
                            "has not left when the next gradient is ready")  # fmt: skip
    return None


def _waits(answer: Answer) -> str | None:
    for rank, one in enumerate(answer.evidence):
        backward = list(zip(_moments(one, BEGINS), _moments(one, OVER), strict=True))
        for call in one.calls:
            if call.waited is not None and any(begin < call.waited < over for begin, over in backward):
                return f"rank {rank} waits inside backward(), so nothing is hidden behind computation"
    return None


# ---------------------------------------------------------------------------------------------------------- inputs


def _ranks(draw: Draw, sizes: list[int], arrive: list[Steps], bucket_size: int, groups: int = 1) -> Inputs:
    return [
        {"grads": [[draw.tensor(n) for n in sizes] for _ in steps], "arrive": steps, "bucket_size": bucket_size,
         "part": rank % groups}
        for rank, steps in enumerate(arrive)
    ]  # fmt: skip


def _sizes(draw: Draw) -> list[int]:
    """Draw sizes of parameters that fill a bucket of 8 in different ways from both ends."""
    return [*draw.sizes(draw.integer(4, 6), 2, 7), 3]


def _other_orders(draw: Draw, ranks: int = 2, groups: int = 1) -> Inputs:
    sizes = _sizes(draw)
    n = len(sizes)
    arrive = [[draw.random.sample(range(n), n) for _ in range(2)] for _ in range(ranks)]
    arrive[0][0], arrive[-1][0] = list(range(n))[::-1], list(range(n))
    return _ranks(draw, sizes, arrive, 8, groups)


def _some_missing(draw: Draw) -> Inputs:
    sizes = _sizes(draw)
    n = len(sizes)
    arrive = [[sorted(draw.random.sample(range(n), draw.integer(1, n - 1)), reverse=True) for _ in range(3)]
              for _ in range(2)]  # fmt: skip
    return _ranks(draw, sizes, arrive, 8)


def _fixed(sizes: list[int], arrive: list[Steps], bucket_size: int, groups: int = 1) -> Callable[[Draw], Inputs]:
    return lambda draw: _ranks(draw, sizes, arrive, bucket_size, groups)


def _usual(draw: Draw) -> Inputs:
    sizes = _sizes(draw)
    return _ranks(draw, sizes, [[list(range(len(sizes)))[::-1]] * 2] * 2, 8)


# What is ready first fills other buckets; buckets of the same sizes are complete in the other order.
_EQUAL = _fixed([4, 4, 4, 4], [[[3, 2, 1, 0]] * 2, [[0, 1, 2, 3], [1, 0, 3, 2]]], 8)
_NOT_ALL = [
    _fixed([4, 2, 4, 4], [[[3, 1, 0], [2], []], [[2, 1, 0], [3, 2], []]], 4),  # one has none, in the last step nobody
    _fixed([2, 3, 4, 2, 5], [[[4, 3, 2], [4, 3, 2, 1, 0]], [[1, 0], [0, 3]]], 6),
]
_MIXED = _fixed([5, 2, 3, 4, 6, 1], [[[5, 4, 3, 2, 1, 0]] * 3] * 2, 6)
_SHOWN = [
    {"grads": [[factor * torch.tensor([1.0]), factor * torch.tensor([2.0])]], "arrive": [order], "bucket_size": 1,
     "part": 0}
    for factor, order in ((1, [1, 0]), (10, [0, 1]))
]  # fmt: skip

_NO_MATCH = "The calls of the ranks do not match: in number, in size, or in their group."

ORDER = Exercise(
    "ordered",
    reference=_summed,
    function="OrderedReducer",
    drive=_drive,
    group={"group": parts},
    accept=[_waits],
    cases=[
        Case("the two parameters of the cell above: 1, 2 on rank 0; 10, 20 on rank 1, in the other order", _SHOWN),
        Case("gradients arrive in another order on each rank", _other_orders, points=2, hidden=True,
             fixed=[_EQUAL, partial(_other_orders, ranks=4, groups=2)], accept=[sends("all_reduce"), _one_a_bucket]),
        Case("some ranks have no gradient of some parameters", _some_missing, points=2, hidden=True, fixed=_NOT_ALL,
             accept=[sends("all_reduce"), _one_a_bucket]),
        Case("in the usual order full buckets leave while backward runs", _usual, points=2, hidden=True,
             fixed=[_MIXED], accept=[_early]),
    ],
    errors={
        "'NoneType' object has no attribute": "Something is None. A parameter that took no part in the loss has no "
        ".grad; its hook was not called.",
        "deadlock": _NO_MATCH,
        "Connection reset by peer": _NO_MATCH,
        "Connection closed by peer": _NO_MATCH,
    },
    idea="What do all ranks know before the first gradient arrives? Who may leave when, if it depends on nothing else?",
    hint="Fill the buckets in __init__, from the last parameter to the first. A hook marks its parameter as ready; "
    "then buckets leave while the *next one in order* is complete. finish() sends the rest in the same order, with "
    "zeros where .grad is None, waits, puts each sum into .grad, and makes everything ready for the next step.",
)  # fmt: skip
