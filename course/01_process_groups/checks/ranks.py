"""Lab 01, what runs on ranks: a ring of sends, f and g, gradients in buckets that overlap, the loss's divisor.

References see the inputs of all ranks, a list, and return one answer for each. What was sent, and when, is in the
evidence: the ring is judged by its bytes and its neighbours, buckets by what had left when the backward pass ended.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.checks import at_most, only, to_the_next
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------------- the ring


def _sum_of_ranks(ranks: Inputs) -> list[torch.Tensor]:
    total = torch.stack([r["x"].double() for r in ranks]).sum(0).to(ranks[0]["x"].dtype)
    return [total] * len(ranks)


def _ring_bound(inputs: Inputs) -> float:
    n, x = len(inputs), inputs[0]["x"]
    return 2 * (n - 1) * math.ceil(x.numel() / n) * x.element_size()


def _even(draw: Draw, least: int = 2) -> Inputs:
    n, k = draw.integer(least, 4), draw.integer(1, 50)
    return [{"x": draw.tensor(n * k)} for _ in range(n)]


def _at_least_three(draw: Draw) -> Inputs:
    return _even(draw, 3)


def _uneven(draw: Draw) -> Inputs:
    n = draw.integer(3, 4)
    shape = draw.integer(1, 5), n * draw.integer(1, 9) + 1
    return [{"x": draw.tensor(*shape)} for _ in range(n)]


RING = Exercise(
    "ring_all_reduce",
    reference=_sum_of_ranks,
    accept=[only("send", "recv")],
    cases=[
        Case("two ranks, four numbers", [{"x": torch.arange(4.0)}, {"x": 10 * torch.ones(4)}]),
        Case("up to four ranks", _even, points=2, hidden=True),
        Case("a matrix whose size N does not divide", _uneven, points=2, hidden=True),
        Case(  # with two ranks, passing the whole tensor on costs no more
            "no more bytes than the ring needs, to one neighbour", _at_least_three, points=2, hidden=True,
            accept=[to_the_next, at_most("2 (N-1)/N n", _ring_bound, "send")],
        ),
    ],
    mistakes=[
        Mistake(lambda ranks: [t / len(ranks) for t in _sum_of_ranks(ranks)], "This is the mean. An all-reduce with "
                "op=sum does not divide."),
        Mistake(lambda ranks: [r["x"] for r in ranks], "Every rank still has its own tensor: what arrives must be "
                "added."),
    ],
    hint="Phase 1, step k: send part (rank - k) % N, add what arrives to part (rank - k - 1) % N. "
    "Phase 2 passes the finished parts on. Start the send without waiting (isend), or everybody waits for everybody.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ f and g


def _drive_pair(exercise: Any, x: Any, w: Any, what: str) -> dict[str, Any]:
    x = x.requires_grad_()
    if what == "copy_to":
        y = exercise.copy_to(x)
    elif what == "reduce_from":
        y = exercise.reduce_from(x)
    else:
        y = exercise.reduce_from((exercise.copy_to(x) * w).tanh())
    (y * (1 if what == "pair" else w)).sum().backward()
    return {"y": y.detach(), "grad": x.grad}


def _pair(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    what = ranks[0]["what"]
    if what == "copy_to":
        total = sum(r["w"] for r in ranks)
        return [{"y": r["x"], "grad": total} for r in ranks]
    if what == "reduce_from":
        total = sum(r["x"] for r in ranks)
        return [{"y": total, "grad": r["w"]} for r in ranks]
    x = ranks[0]["x"].clone().requires_grad_()
    y = sum((x * r["w"]).tanh() for r in ranks)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return [{"y": y.detach(), "grad": grad}] * len(ranks)


def _no_backward_sum(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _pair(ranks)
    if ranks[0]["what"] == "copy_to":
        return [{"y": a["y"], "grad": r["w"]} for a, r in zip(right, ranks, strict=True)]
    grads = [r["w"] * (1 - (r["x"] * r["w"]).tanh() ** 2) for r in ranks]
    return [{"y": a["y"], "grad": g} for a, g in zip(right, grads, strict=True)]


def _sum_twice(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _pair(ranks)
    if ranks[0]["what"] == "reduce_from":
        total = sum(r["w"] for r in ranks)
        return [{**a, "grad": total} for a in right]
    return [{**a, "grad": a["grad"] * len(ranks)} for a in right]


def _tensors(what: str) -> Any:
    def draw_them(draw: Draw) -> Inputs:
        shape = draw.integer(1, 6), draw.integer(1, 6)
        x = draw.tensor(*shape)
        each = (lambda: x) if what != "reduce_from" else (lambda: draw.tensor(*shape))
        return [{"x": each().clone(), "w": draw.tensor(*shape), "what": what} for _ in range(draw.integer(2, 4))]

    return draw_them


_TWO = [{"x": torch.ones(2), "w": w * torch.tensor([1.0, 2.0]), "what": "copy_to"} for w in (1, 10)]

PAIR = Exercise(
    "conjugates",
    reference=_pair,
    function="copy_to",
    drive=_drive_pair,
    cases=[
        Case("copy_to on two ranks", _TWO),
        Case("copy_to: forward and gradient", _tensors("copy_to"), hidden=True),
        Case("reduce_from: forward and gradient", _tensors("reduce_from"), hidden=True),
        Case("the pair around different work on each rank", _tensors("pair"), points=2, hidden=True),
    ],
    mistakes=[
        Mistake(_no_backward_sum, "copy_to must sum in its backward: each rank holds only the gradient through its own "
                "work."),
        Mistake(_sum_twice, "Summed once too often: the gradient of an all-reduce is already the same on every rank."),
    ],
    hint="copy_to: nothing forward, all-reduce backward. reduce_from: all-reduce forward, nothing backward. "
    "Do not change your input in place.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ buckets


def _drive_buckets(exercise: Any, x: Any, layers: int, bucket_size: int) -> list[Any]:
    import torch as t
    import torch.distributed as dist

    generator = t.Generator().manual_seed(0)
    weights = [t.randn(4, 4, generator=generator).mul(0.5).requires_grad_() for _ in range(layers)]
    reducer = exercise.OverlappedReducer(weights, bucket_size)
    for w in weights:
        x = t.tanh(x @ w)
    x.sum().backward()
    dist.barrier()
    reducer.finish()
    return [w.grad for w in weights]


def _summed_gradients(ranks: Inputs) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=generator).mul(0.5).requires_grad_() for _ in range(ranks[0]["layers"])]
    outputs = []
    for r in ranks:
        x = r["x"]
        for w in weights:
            x = torch.tanh(x @ w)
        outputs.append(x.sum())
    grads = list(torch.autograd.grad(torch.stack(outputs).sum(), weights))
    return [grads] * len(ranks)


def _net(draw: Draw) -> Inputs:
    layers, per_bucket = draw.choice([5, 7]), draw.integer(2, 3)  # the last bucket is never full
    sizes = {"layers": layers, "bucket_size": 16 * per_bucket}
    return [{"x": draw.tensor(draw.integer(1, 4), 4), **sizes} for _ in range(2)]


def _one_launch_a_bucket(answer: Answer) -> str | None:
    buckets = math.ceil(answer.inputs[0]["layers"] * 16 / answer.inputs[0]["bucket_size"])
    for rank, one in enumerate(answer.evidence):
        if one.count("all_reduce") != buckets:
            return f"rank {rank} calls all_reduce {one.count('all_reduce')} times; {buckets} buckets need {buckets}"
    return None


def _before_backward_ends(answer: Answer) -> str | None:
    buckets = answer.inputs[0]["layers"] * 16 // answer.inputs[0]["bucket_size"]
    for rank, one in enumerate(answer.evidence):
        names = [call.name for call in one.calls]
        early = names[: names.index("barrier")].count("all_reduce") if "barrier" in names else 0
        if early < buckets:
            return f"on rank {rank} {early} of {buckets} full buckets had left when backward() returned"
    return None


BUCKETS = Exercise(
    "overlap",
    reference=_summed_gradients,
    function="OverlappedReducer",
    drive=_drive_buckets,
    dtypes=(torch.float32,),  # the drive's weights are
    cases=[
        Case("gradients are summed over ranks", _net, points=2, hidden=True),
        Case("one all-reduce a bucket", _net, hidden=True, accept=[
            only("all_reduce", "barrier"), _one_launch_a_bucket]),
        Case("full buckets leave while backward still runs", _net, points=2, hidden=True, accept=[
            _before_backward_ends]),
    ],
    mistakes=[
        Mistake(lambda ranks: [[g / len(ranks) for g in gs] for gs in _summed_gradients(ranks)], "Sum, do not average: "
                "who divides comes later."),
    ],
    hint="In the hook: add the parameter to the open bucket; once it holds bucket_size elements, flatten it and start "
    "all_reduce(async_op=True). finish() starts the last one, waits for all, and copies the sums back.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- the divisor


def _drive_loss(exercise: Any, losses: Any, mask: Any) -> dict[str, Any]:
    import torch.distributed as dist

    losses = losses.requires_grad_()
    exercise.rank_loss(losses, mask).backward()
    seen = losses.grad.clone()
    total = (losses.detach() * seen).sum()
    dist.all_reduce(total)
    return {"grad": seen, "loss": total}


def _global_mean(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    count = max(sum(float(r["mask"].sum()) for r in ranks), 1.0)
    grads = [r["mask"] / count for r in ranks]
    loss = sum((r["losses"] * g).sum() for r, g in zip(ranks, grads, strict=True))
    return [{"grad": g, "loss": loss} for g in grads]


def _scaled(scale: Any) -> Any:
    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        grads = [r["mask"] * scale(r["mask"], len(ranks)) for r in ranks]
        loss = sum((r["losses"] * g).sum() for r, g in zip(ranks, grads, strict=True))
        return [{"grad": g, "loss": loss} for g in grads]

    return answer


def _masked(draw: Draw) -> Inputs:
    shape = draw.integer(1, 3), draw.integer(6, 12)
    out = []
    for _ in range(draw.integer(2, 4)):
        mask = (draw.tensor(*shape) > draw.choice([-1.0, 0.0, 0.5])).float()
        mask[0, 0] = 1.0
        out.append({"losses": draw.tensor(*shape), "mask": mask})
    return out


def _one_empty(draw: Draw) -> Inputs:
    out = _masked(draw)
    out[0]["mask"] = torch.zeros_like(out[0]["mask"])
    return out


LOSS = Exercise(
    "rank_loss",
    reference=_global_mean,
    drive=_drive_loss,
    cases=[
        Case("three tokens count on rank 0, one on rank 1", [
            {"losses": torch.tensor([[1.0, 2.0, 3.0]]), "mask": torch.ones(1, 3)},
            {"losses": torch.tensor([[4.0, 5.0, 6.0]]), "mask": torch.tensor([[1.0, 0.0, 0.0]])}]),
        Case("any counts", _masked, points=2, hidden=True),
        Case("a rank without a single counted token", _one_empty, hidden=True),
    ],
    mistakes=[
        Mistake(_scaled(lambda m, n: 1 / (m.sum() * n)), "This is the mean of the ranks' means: every rank's tokens "
                "would weigh the same in sum."),
        Mistake(_scaled(lambda m, n: 1 / m.sum()), "You divide by this rank's own count. The batch is spread over all "
                "ranks."),
        Mistake(_scaled(lambda m, n: 1 / (m.numel() * n)), "Masked tokens do not count: divide by the number of ones "
                "in the masks."),
        Mistake(_scaled(lambda m, n: 1.0), "Somebody must divide: by the number of counted tokens of all ranks."),
    ],
    hint="Sum the masked losses; divide by the all-reduced number of counted tokens (never by zero).",
)  # fmt: skip
