"""Checks of lab 01: bytes, groups by one reshape, a ring of one's own, f and g, a sampler, buckets, the divisor."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig
from minimegatron.lab.checks import at_most, only
from minimegatron.lab.exercises import Answer, Case, Draw, Exercise, Lab, Mistake

Inputs = list[dict[str, Any]]

# ------------------------------------------------------------------------------------------- 1 bytes of a ring


def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """What each rank sends when the collective runs as a ring on a tensor of `nbytes` in all."""
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


def _an_all_reduce(draw: Draw) -> dict[str, Any]:
    return {"op": "all_reduce", "nbytes": 64 * draw.integer(1, 10**6), "ranks": draw.integer(2, 64)}


def _half_of_one(draw: Draw) -> dict[str, Any]:
    return {**_an_all_reduce(draw), "op": draw.choice(["all_gather", "reduce_scatter"])}


_PREDICT = Exercise(
    "bytes_sent",
    reference=bytes_sent,
    cases=[
        Case("an all-gather of 12 bytes in all over 3 ranks", {"op": "all_gather", "nbytes": 12, "ranks": 3}),
        Case("an all-reduce of 1 MiB over 4 ranks", {"op": "all_reduce", "nbytes": 1 << 20, "ranks": 4}),
        Case("one rank has nobody to send to", {"op": "all_reduce", "nbytes": 1 << 20, "ranks": 1}),
        Case("an all-reduce of another size, over other ranks", _an_all_reduce, hidden=True),
        Case("one of its halves", _half_of_one, hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda op, nbytes, ranks: nbytes * (ranks - 1) / ranks,
            "An all-reduce is a reduce-scatter and then an all-gather.",
        ),
        Mistake(
            lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * nbytes,
            "Each rank already has its own part: N-1 of N parts travel.",
        ),
        Mistake(
            lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1),
            "A step of the ring sends one part, n/N bytes, not the whole tensor.",
        ),
    ],
    hint="Count the steps of the ring and the bytes of one step: N-1 steps of n/N bytes, once or twice.",
)

# ---------------------------------------------------------------------------------------- 2 groups by a reshape


def axis_groups(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


def _slowest_first(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    return axis_groups(dict(reversed(sizes.items())), axes)


def _in_blocks(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    n = math.prod(sizes[a] for a in axes)
    return torch.arange(math.prod(sizes.values())).view(-1, n).tolist()


def _a_layout(draw: Draw) -> dict[str, int]:
    return {name: draw.choice([1, 2, 3, 4]) for name in ("tp", "cp", "dp", "pp")}


def _one_axis(draw: Draw) -> dict[str, Any]:
    sizes = _a_layout(draw)
    return {"sizes": {**sizes, "cp": 2, "dp": 3}, "axes": [draw.choice(["tp", "cp", "dp", "pp"])]}


def _two_axes(draw: Draw) -> dict[str, Any]:
    sizes = {**_a_layout(draw), "tp": 2, "dp": 2, "pp": 2}
    return {"sizes": sizes, "axes": draw.choice([["dp", "cp"], ["tp", "pp"], ["cp", "dp"], ["tp", "cp", "dp"]])}


SIXTEEN = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}

_GROUPS = Exercise(
    "axis_groups",
    reference=axis_groups,
    cases=[
        Case("tp groups of 16 ranks", {"sizes": SIXTEEN, "axes": ["tp"]}),
        Case("dp groups of 16 ranks", {"sizes": SIXTEEN, "axes": ["dp"]}),
        Case("dp-cp groups: everybody with the same weights", {"sizes": SIXTEEN, "axes": ["dp", "cp"]}),
        Case("the expert grid is the same function", {"sizes": {"etp": 1, "ep": 4, "edp": 2, "pp": 2}, "axes": ["ep"]}),
        Case("one axis, other sizes", _one_axis, points=2, hidden=True),
        Case("several axes at once", _two_axes, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(_slowest_first, "The first axis in `sizes` varies fastest; `view` wants the slowest first."),
        Mistake(
            _in_blocks,
            "Neighbouring ranks are a group only along the fastest axis. Move the wanted dims last, then reshape.",
        ),
    ],
    hint="grid = arange(world).view(slowest ... fastest); put the dims of `axes` last, in the same order, "
    "and reshape to [-1, members].",
)

# ------------------------------------------------------------------------------------------------- 3 the ring


def _sum_of_ranks(ranks: Inputs) -> list[torch.Tensor]:
    total = torch.stack([r["x"].double() for r in ranks]).sum(0).to(ranks[0]["x"].dtype)
    return [total] * len(ranks)


def _ring_bound(inputs: Inputs) -> float:
    n, x = len(inputs), inputs[0]["x"]
    return 2 * (n - 1) * math.ceil(x.numel() / n) * x.element_size()


def _only_to_the_right(answer: Answer) -> str | None:
    n = len(answer.evidence)
    for rank, one in enumerate(answer.evidence):
        wrong = sorted({call.peer for call in one.calls if call.name == "send"} - {(rank + 1) % n})
        if wrong:
            return f"rank {rank} sends to rank {wrong[0]}; in this ring it sends only to rank {(rank + 1) % n}"
    return None


def _even(draw: Draw) -> Inputs:
    n, k = draw.integer(2, 4), draw.integer(1, 50)
    return [{"x": draw.tensor(n * k)} for _ in range(n)]


def _at_least_three(draw: Draw) -> Inputs:
    n, k = draw.integer(3, 4), draw.integer(1, 50)
    return [{"x": draw.tensor(n * k)} for _ in range(n)]


def _uneven(draw: Draw) -> Inputs:
    n = draw.integer(3, 4)
    shape = draw.integer(1, 5), n * draw.integer(1, 9) + 1
    return [{"x": draw.tensor(*shape)} for _ in range(n)]


_RING = Exercise(
    "ring_all_reduce",
    reference=_sum_of_ranks,
    accept=[only("send", "recv")],
    cases=[
        Case("two ranks, four numbers", [{"x": torch.arange(4.0)}, {"x": 10 * torch.ones(4)}]),
        Case("up to four ranks", _even, points=2, hidden=True),
        Case("a matrix whose size N does not divide", _uneven, points=2, hidden=True),
        Case(
            "no more bytes than the ring needs, to one neighbour",
            _at_least_three,  # with two ranks, passing the whole tensor on costs no more
            points=2,
            hidden=True,
            accept=[_only_to_the_right, at_most("2 (N-1)/N n", _ring_bound, "send")],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [t / len(ranks) for t in _sum_of_ranks(ranks)],
            "This is the mean. An all-reduce with op=sum does not divide.",
        ),
        Mistake(
            lambda ranks: [r["x"] for r in ranks], "Every rank still has its own tensor: what arrives must be added."
        ),
    ],
    hint="Phase 1, step k: send part (rank - k) % N, add what arrives to part (rank - k - 1) % N. "
    "Phase 2 passes the finished parts on. Start the send without waiting (isend), or everybody waits for everybody.",
)

# ------------------------------------------------------------------------------------------------ 4 f and g


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


_PAIR = Exercise(
    "conjugates",
    reference=_pair,
    function="copy_to",
    drive=_drive_pair,
    cases=[
        Case(
            "copy_to on two ranks",
            [
                {"x": torch.ones(2), "w": torch.tensor([1.0, 2.0]), "what": "copy_to"},
                {"x": torch.ones(2), "w": torch.tensor([10.0, 20.0]), "what": "copy_to"},
            ],
        ),
        Case("copy_to: forward and gradient", _tensors("copy_to"), hidden=True),
        Case("reduce_from: forward and gradient", _tensors("reduce_from"), hidden=True),
        Case("the pair around different work on each rank", _tensors("pair"), points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            _no_backward_sum,
            "copy_to must sum in its backward: each rank holds only the gradient through its own work.",
        ),
        Mistake(_sum_twice, "Summed once too often: the gradient of an all-reduce is already the same on every rank."),
    ],
    hint="copy_to: nothing forward, all-reduce backward. reduce_from: all-reduce forward, nothing backward. "
    "Do not change your input in place.",
)

# ------------------------------------------------------------------------------------------------ 5 sampler


def my_samples(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    first = consumed + dp_rank * micro_batch
    return [
        int(_order(seed, p // num_samples, num_samples)[p % num_samples]) for p in range(first, first + micro_batch)
    ]


def _order(seed: int, epoch: int, num_samples: int) -> numpy.ndarray:
    return numpy.random.RandomState(seed + epoch).permutation(num_samples)


def _sampler(draw: Draw) -> dict[str, Any]:
    dp, micro = draw.integer(1, 8), draw.integer(1, 6)
    return {
        "consumed": dp * micro * draw.integer(0, 50),
        "micro_batch": micro,
        "dp_rank": draw.integer(0, dp - 1),
        "dp_size": dp,
        "num_samples": draw.integer(20, 60),
        "seed": draw.integer(0, 10**6),
    }


def _crossing(draw: Draw) -> dict[str, Any]:
    dp, micro, num_samples = draw.integer(1, 4), draw.integer(3, 6), draw.integer(20, 40)
    rank = draw.integer(0, dp - 1)
    inside = draw.integer(1, micro - 1)  # how many of this rank's samples belong to the earlier epoch
    consumed = num_samples * draw.integer(2, 9) - inside - rank * micro
    others = {"dp_size": dp, "num_samples": num_samples, "seed": draw.integer(0, 10**6)}
    return {"consumed": consumed, "micro_batch": micro, "dp_rank": rank, **others}


def _strided(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    order = [_order(seed, e, num_samples) for e in range(2 + (consumed + dp_size * micro_batch) // num_samples)]
    flat = numpy.concatenate(order)
    return [int(i) for i in flat[consumed + dp_rank : consumed + dp_rank + micro_batch * dp_size : dp_size]]


def _one_epoch(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    first = consumed + dp_rank * micro_batch
    order = _order(seed, first // num_samples, num_samples)
    return [int(order[p % num_samples]) for p in range(first, first + micro_batch)]


def _same_every_epoch(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    first = consumed + dp_rank * micro_batch
    return [int(_order(seed, 0, num_samples)[p % num_samples]) for p in range(first, first + micro_batch)]


_SAMPLER = Exercise(
    "my_samples",
    reference=my_samples,
    cases=[
        Case(
            "the first two of rank 1",
            {"consumed": 0, "micro_batch": 2, "dp_rank": 1, "dp_size": 2, "num_samples": 10, "seed": 1},
        ),
        Case(
            "after 8 samples",
            {"consumed": 8, "micro_batch": 1, "dp_rank": 0, "dp_size": 2, "num_samples": 10, "seed": 1},
        ),
        Case(
            "a batch that begins in one epoch and ends in the next",
            {"consumed": 18, "micro_batch": 4, "dp_rank": 0, "dp_size": 1, "num_samples": 10, "seed": 3},
        ),
        Case("anywhere, any dp", _sampler, hidden=True),
        Case("across the end of some epoch", _crossing, hidden=True),
    ],
    mistakes=[
        Mistake(_same_every_epoch, "Every epoch has an order of its own: seed + epoch."),
        Mistake(
            _one_epoch,
            "A batch can begin in one epoch and end in the next: find the epoch of each sample, not of the batch.",
        ),
        Mistake(
            _strided,
            "Rank r takes a contiguous block: positions consumed + r*micro_batch and the micro_batch-1 after it.",
        ),
    ],
    hint="Global position p has epoch p // num_samples and place p % num_samples in that epoch's permutation.",
)

# ------------------------------------------------------------------------------------------------ 6 buckets


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
    return [
        {"x": draw.tensor(draw.integer(1, 4), 4), "layers": layers, "bucket_size": 16 * per_bucket} for _ in range(2)
    ]


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


_BUCKETS = Exercise(
    "overlap",
    reference=_summed_gradients,
    function="OverlappedReducer",
    drive=_drive_buckets,
    cases=[
        Case("gradients are summed over ranks", _net, points=2, hidden=True),
        Case(
            "one all-reduce a bucket", _net, hidden=True, accept=[only("all_reduce", "barrier"), _one_launch_a_bucket]
        ),
        Case(
            "full buckets leave while backward still runs", _net, points=2, hidden=True, accept=[_before_backward_ends]
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [[g / len(ranks) for g in gs] for gs in _summed_gradients(ranks)],
            "Sum, do not average: who divides comes later.",
        ),
    ],
    hint="In the hook: add the parameter to the open bucket; once it holds bucket_size elements, flatten it and start "
    "all_reduce(async_op=True). finish() starts the last one, waits for all, and copies the sums back.",
)

# ------------------------------------------------------------------------------------------------ 7 the divisor


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


_LOSS = Exercise(
    "rank_loss",
    reference=_global_mean,
    drive=_drive_loss,
    cases=[
        Case(
            "three tokens count on rank 0, one on rank 1",
            [
                {"losses": torch.tensor([[1.0, 2.0, 3.0]]), "mask": torch.ones(1, 3)},
                {"losses": torch.tensor([[4.0, 5.0, 6.0]]), "mask": torch.tensor([[1.0, 0.0, 0.0]])},
            ],
        ),
        Case("any counts", _masked, points=2, hidden=True),
        Case("a rank without a single counted token", _one_empty, hidden=True),
    ],
    mistakes=[
        Mistake(
            _scaled(lambda m, n: 1 / (m.sum() * n)),
            "This is the mean of the ranks' means: every rank's tokens would weigh the same in sum.",
        ),
        Mistake(
            _scaled(lambda m, n: 1 / m.sum()),
            "You divide by this rank's own count. The batch is spread over all ranks.",
        ),
        Mistake(
            _scaled(lambda m, n: 1 / (m.numel() * n)),
            "Masked tokens do not count: divide by the number of ones in the masks.",
        ),
        Mistake(_scaled(lambda m, n: 1.0), "Somebody must divide: by the number of counted tokens of all ranks."),
    ],
    hint="Sum the masked losses; divide by the all-reduced number of counted tokens (never by zero).",
)

# ------------------------------------------------------------------------------------------------ 8 questions


def answers(
    world: int, tp: int, cp: int, pp: int, ep: int, etp: int, gigabytes: float, gb_per_second: float
) -> dict[str, Any]:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    peers = rank_groups(parallel, world, "dp-cp")
    n = len(peers[0])
    return {
        "dp": parallel.data_parallel_size(world),
        "edp": world // (etp * ep * pp),
        "same_weights_as_rank_0": peers[0][:4],
        "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second,
    }


def _a_cluster(draw: Draw) -> dict[str, Any]:
    tp, cp, pp = draw.choice([2, 4, 8]), draw.choice([1, 2]), draw.choice([2, 4])
    dp, etp = draw.choice([4, 8]), draw.choice([1, 2])
    sizes = {"world": tp * cp * pp * dp, "tp": tp, "cp": cp, "pp": pp, "ep": draw.choice([2, 4]), "etp": etp}
    return {**sizes, "gigabytes": float(draw.integer(1, 20)), "gb_per_second": float(draw.integer(10, 400))}


def _ep_costs_ranks(
    world: int, tp: int, cp: int, pp: int, ep: int, etp: int, gigabytes: float, gb_per_second: float
) -> dict[str, Any]:
    right = answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second)
    return {**right, "dp": world // (tp * cp * pp * ep)}


_QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case(
            "64 ranks",
            {"world": 64, "tp": 4, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "gigabytes": 7.0, "gb_per_second": 50.0},
        ),
        Case("another cluster", _a_cluster, points=2, hidden=True),
    ],
    mistakes=[Mistake(_ep_costs_ranks, "Expert parallelism takes no ranks of its own: dp = world / (tp * cp * pp).")],
    hint="dp from the dense grid, edp from the expert grid; the peers are rank 0's dp-cp group, its first four; "
    "the time is the ring's bytes over the bandwidth.",
)

LAB = Lab("01_process_groups", [_PREDICT, _GROUPS, _RING, _PAIR, _SAMPLER, _BUCKETS, _LOSS, _QUESTIONS])
