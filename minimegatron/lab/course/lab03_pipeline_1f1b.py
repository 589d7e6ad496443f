"""Checks of lab 03: the bubble, four schedules as lists, a backward in two halves, tied weights, a lost gradient.

A list of actions has no single right answer, so a schedule is judged by what it does: the checker says whether it runs,
the simulator how long it takes, and counting how many activations each rank keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from minimegatron.errors import ConfigError
from minimegatron.lab.checks import at_most
from minimegatron.lab.exercises import Accept, Answer, Case, Draw, Exercise, Lab, Mistake
from minimegatron.parallel.actions import Action, Schedule, round_robin
from minimegatron.parallel.schedule_check import check, peak_live
from minimegatron.parallel.schedule_sim import Costs, simulate

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- 1 the bubble


def bubble(p: int, m: int, v: int) -> float:
    """Idle time over work, with p ranks, m microbatches, v chunks a rank."""
    return (p - 1) / (m * v)


def _sizes(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 16)
    return {"p": p, "m": p * draw.integer(1, 12), "v": draw.integer(1, 4)}


_PREDICT = Exercise(
    "bubble",
    reference=bubble,
    cases=[
        Case("4 ranks, 8 microbatches", {"p": 4, "m": 8, "v": 1}),
        Case("the same with 2 chunks a rank", {"p": 4, "m": 8, "v": 2}),
        Case("one rank never waits", {"p": 1, "m": 8, "v": 1}),
        Case("other pipelines", _sizes, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(lambda p, m, v: (p - 1) / m, "With v chunks a rank, filling and draining take steps of a v-th."),
        Mistake(
            lambda p, m, v: (p - 1) / v / (m + (p - 1) / v),
            "This is the share of the whole time. Asked is idle time over *work*: divide by the work alone.",
        ),
        Mistake(lambda p, m, v: p / (m * v), "The first rank is p-1 steps from the last, not p."),
    ],
    hint="A rank works m steps. While the pipeline fills and drains it waits p-1 steps, each 1/v as long.",
)

# ------------------------------------------------------------------------------------- lists: how they are judged


def _read(answer: Answer, v: int) -> Schedule:
    """The learner's lists as a schedule.

    Raises:
        ConfigError: they are no lists of actions, or of another number of microbatches.
    """
    rows = [_actions(row, rank) for rank, row in enumerate(answer.value)]
    schedule = Schedule("yours", tuple(rows), round_robin(len(rows), v))
    if schedule.m != answer.inputs["m"]:
        raise ConfigError(f"it runs {schedule.m} microbatches, not {answer.inputs['m']}")
    return schedule


def _actions(row: Any, rank: int) -> tuple[Action, ...]:
    """A list of words such as F0 or B3.1, or one string of them."""
    if not isinstance(row, str | list | tuple) or not all(isinstance(word, str) for word in row):
        raise ConfigError(f'rank {rank}: a list of words is wanted, such as ["F0", "B0"]')
    return tuple(map(Action.parse, row.split() if isinstance(row, str) else row))


def _judged(*rules: Callable[[Schedule, dict[str, Any]], str | None]) -> Accept:
    """The lists run, and each rule is satisfied with them."""

    def accept(answer: Answer) -> str | None:
        try:
            schedule = _read(answer, answer.inputs.get("v", 1))
        except ConfigError as error:
            return error.what
        problems = check(schedule)
        if problems:
            return problems[0]
        return next(filter(None, (rule(schedule, answer.inputs) for rule in rules)), None)

    return accept


def _no_longer(bound: Callable[..., Fraction | int]) -> Callable[[Schedule, dict[str, Any]], str | None]:
    """With F = B = W = 1 for a whole rank it takes no more than the bound."""

    def rule(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
        takes = simulate(schedule, Costs().divided(schedule.v)).makespan
        within = bound(**inputs)
        if takes > within:
            return f"it takes {float(takes):g} steps (F 1, whole backward 2); {float(within):g} are enough"
        return None

    return rule


def _keeps(bound: Callable[..., int]) -> Callable[[Schedule, dict[str, Any]], str | None]:
    """No rank keeps more activations than the bound."""

    def rule(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
        for rank, most in enumerate(peak_live(schedule)):
            enough = bound(rank, **inputs)
            if most > enough:
                return f"rank {rank} keeps {most} activations at a time; {enough} are enough"
        return None

    return rule


def _forwards_first(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
    for rank, row in enumerate(schedule.actions):
        kinds = "".join(a.kind for a in row)
        if "BF" in kinds:
            return f"rank {rank} goes back before its last forward; GPipe does all forwards first"
    return None


def _all_split(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
    for rank in range(schedule.p):
        for i in range(schedule.m):
            if not schedule.is_split(i, rank):
                return f"rank {rank} has a B{i} but no W{i}: every backward is to be split"
    return None


def _whole(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
    return "it holds a W; here a backward is undivided" if schedule.splits else None


def _few(draw: Draw) -> dict[str, Any]:
    p = draw.integer(3, 6)
    return {"p": p, "m": draw.integer(1, p - 2)}


def _many(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 6)
    return {"p": p, "m": draw.integer(2 * p, 3 * p)}


# -------------------------------------------------------------------------------------------------- 2 GPipe


def _drive_gpipe(exercise: Any, p: int, m: int) -> list[Any]:
    return [exercise.gpipe(rank, p, m) for rank in range(p)]


_GPIPE = Exercise(
    "gpipe",
    drive=_drive_gpipe,
    accept=[_judged(_whole, _forwards_first, _no_longer(lambda p, m: 3 * (m + p - 1)))],
    cases=[
        Case("2 ranks, 3 microbatches", {"p": 2, "m": 3}),
        Case("fewer microbatches than ranks", _few, hidden=True),
        Case("more", _many, points=2, hidden=True),
    ],
    hint="Every rank has the same list: F of all m microbatches, then B of all m, in an order that all ranks share.",
)

# --------------------------------------------------------------------------------------------------- 3 1F1B


def _drive_1f1b(exercise: Any, p: int, m: int) -> list[Any]:
    return [exercise.one_f_one_b(rank, p, m) for rank in range(p)]


_MEMORY = _keeps(lambda rank, p, m: min(m, p - rank))
_TIME = _no_longer(lambda p, m: 3 * (m + p - 1))

_1F1B = Exercise(
    "one_f_one_b",
    drive=_drive_1f1b,
    accept=[_judged(_whole)],
    cases=[
        Case("2 ranks, 4 microbatches: it runs", {"p": 2, "m": 4}),
        Case("more microbatches than ranks: it runs", _many, hidden=True),
        Case("fewer: it runs", _few, hidden=True),
        Case("it takes no longer than GPipe", _many, hidden=True, accept=[_judged(_TIME)]),
        Case("rank r keeps at most p - r activations", _many, points=2, hidden=True, accept=[_judged(_TIME, _MEMORY)]),
    ],
    hint="Rank r does min(m, p-r-1) forwards to warm up. Then a forward and a backward in turn while forwards are "
    "left, then the backwards that remain.",
)

# -------------------------------------------------------------------------------------------- 4 interleaved


def _drive_interleaved(exercise: Any, p: int, m: int, v: int) -> list[Any]:
    return [exercise.interleaved(rank, p, m, v) for rank in range(p)]


def _chunked(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 4)
    return {"p": p, "m": p * draw.integer(2, 4), "v": draw.integer(2, 3)}


def _one_group(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 4)
    return {"p": p, "m": p, "v": draw.integer(2, 4)}


_FASTER = _no_longer(lambda p, m, v: 3 * m + Fraction(3 * (p - 1), v))
_WARM = _keeps(lambda rank, p, m, v: min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1))

_INTERLEAVED = Exercise(
    "interleaved",
    drive=_drive_interleaved,
    accept=[_judged(_whole)],
    cases=[
        Case("2 ranks, 4 microbatches, 2 chunks: it runs", {"p": 2, "m": 4, "v": 2}),
        Case("other sizes: it runs", _chunked, hidden=True),
        Case("as many microbatches as ranks: it runs", _one_group, hidden=True),
        Case("the bubble is (p-1)/(vm)", _chunked, points=2, hidden=True, accept=[_judged(_FASTER)]),
        Case("no more activations than warm-up + 1", _chunked, hidden=True, accept=[_judged(_FASTER, _WARM)]),
    ],
    hint="One table for all ranks: for each group of p microbatches, for each chunk, for each microbatch of the group. "
    "F(k) is table[k]; B(k) is the same microbatch with chunk v-1-c. Warm up with 2(p-r-1) + (v-1)p forwards, "
    "at most all of them, then F and B in turn.",
)

# ------------------------------------------------------------------------------------------- 5 two halves of B


def _drive_stage(exercise: Any, weight: Any, xs: Any, dys: Any, order: Any) -> dict[str, Any]:
    import torch as t
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        """Counts matrix products."""

        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.split("::")[1]
            self.count += name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear")
            return func(*args, **(kwargs or {}))

    stage = exercise.SplitStage(weight.clone())
    ys, dxs, early, made = [None] * len(xs), [None] * len(xs), 0.0, {"F": 0, "B": 0, "W": 0}
    for word in order.split():
        kind, i = word[0], int(word[1:])
        before = stage.grad.clone()
        with Products() as products:
            if kind == "F":
                ys[i] = stage.forward(i, xs[i].clone()).detach()
            elif kind == "B":
                dxs[i] = stage.backward(i, dys[i].clone()).detach()
            else:
                stage.weights(i)
        made[kind] += products.count
        if kind != "W":
            early = max(early, float((stage.grad - before).abs().max()))
    grad = t.as_tensor(stage.grad).detach()
    return {"y": ys, "dx": dxs, "grad": grad, "early": early, "products": made}


def _halves(weight: torch.Tensor, xs: list, dys: list, order: str) -> dict[str, Any]:
    """In float64, by the chain rule."""
    w = weight.double()
    ys = [torch.tanh(x.double() @ w) for x in xs]
    dzs = [dy.double() * (1 - y**2) for dy, y in zip(dys, ys, strict=True)]
    done = [int(word[1:]) for word in order.split() if word[0] == "W"]
    grad = sum((xs[i].double().T @ dzs[i] for i in done), start=torch.zeros_like(w))
    as_given = [t.to(weight.dtype) for t in ys], [(dz @ w.T).to(weight.dtype) for dz in dzs]
    return {"y": as_given[0], "dx": as_given[1], "grad": grad.to(weight.dtype)}


def _right_halves(answer: Answer) -> str | None:
    want, got = _halves(**answer.inputs), answer.value
    for name, what in (("y", "the output"), ("dx", "the gradient of the input"), ("grad", "the weight's gradient")):
        pairs = zip(got[name], want[name], strict=True) if name != "grad" else [(got[name], want[name])]
        for i, (one, other) in enumerate(pairs):
            if one is None or one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                return f"{what} is wrong" + (f", first for microbatch {i}" if name != "grad" else "")
    return None


def _not_early(answer: Answer) -> str | None:
    return "the weight's gradient has changed before its W" if answer.value["early"] > 0 else None


def _b_alone(answer: Answer) -> str | None:
    n, made = len(answer.inputs["xs"]), answer.value["products"]["B"]
    return f"{n} backwards make {made} matrix products; one each is B, the other is W" if made > n else None


def _stage_inputs(order: Callable[[int, Draw], str]) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        n, rows, columns = draw.integer(2, 4), draw.integer(2, 5), draw.integer(2, 5)
        xs = [draw.tensor(draw.integer(1, 4), rows) for _ in range(n)]
        dys = [draw.tensor(len(x), columns) for x in xs]
        return {"weight": draw.tensor(rows, columns), "xs": xs, "dys": dys, "order": order(n, draw)}

    return sizes


def _w_last(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FBW" for i in range(n))


def _mixed(n: int, draw: Draw) -> str:
    order = [f"F{i}" for i in range(n)] + [f"{k}{i}" for i in reversed(range(n)) for k in "BW"]
    return " ".join(order)


def _b_only(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FB" for i in range(n))


_ONE = {"weight": torch.eye(2), "xs": [torch.ones(1, 2)], "dys": [torch.ones(1, 2)], "order": "F0 B0 W0"}

_STAGE = Exercise(
    "split_stage",
    function="SplitStage",
    drive=_drive_stage,
    accept=[_not_early, _right_halves],
    cases=[
        Case("one microbatch: F0 B0 W0", _ONE),
        Case("several, every W at the end", _stage_inputs(_w_last), points=2, hidden=True),
        Case("the last microbatch goes back first", _stage_inputs(_mixed), hidden=True),
        Case("B computes the input's half and nothing else", _stage_inputs(_b_only), hidden=True, accept=[_b_alone]),
    ],
    hint="Keep x and y by microbatch. With dz = dy * (1 - y*y): B returns dz @ W.T, W *adds* x.T @ dz to self.grad.",
)

# ------------------------------------------------------------------------------------------------- 6 ZB-H1


def _drive_zb(exercise: Any, p: int, m: int) -> list[Any]:
    return [exercise.zb_h1(rank, p, m) for rank in range(p)]


_THIRD = _no_longer(lambda p, m: 3 * m + p - 1)
_AS_BEFORE = _keeps(lambda rank, p, m: min(m, p))

_ZB = Exercise(
    "zb_h1",
    drive=_drive_zb,
    accept=[_judged(_all_split)],
    cases=[
        Case("2 ranks, 4 microbatches: it runs, every backward split", {"p": 2, "m": 4}),
        Case("other sizes: it runs", _many, hidden=True),
        Case("fewer microbatches than ranks: it runs", _few, hidden=True),
        Case("a third of 1F1B's bubble", _many, points=2, hidden=True, accept=[_judged(_THIRD)]),
        Case("no rank keeps more than p activations", _many, hidden=True, accept=[_judged(_THIRD, _AS_BEFORE)]),
    ],
    hint="Start from your 1F1B. Rank r does W of a microbatch r microbatches later: after B of microbatch i, do W of "
    "i - r (if there is one); what is left of W comes at the end.",
)

# -------------------------------------------------------------------------------------------- 7 tied weights


def _tied(ranks: Inputs) -> list[Any]:
    total = ranks[0]["grad"] + ranks[-1]["grad"]
    return [total if r["grad"] is not None else None for r in ranks]


def _ends(draw: Draw) -> Inputs:
    n, shape = draw.integer(3, 4), (draw.integer(2, 5), draw.integer(2, 5))
    return [{"grad": draw.tensor(*shape) if r in (0, n - 1) else None} for r in range(n)]


def _two_ends(draw: Draw) -> Inputs:
    shape = draw.integer(2, 5), draw.integer(2, 5)
    return [{"grad": draw.tensor(*shape)} for _ in range(2)]


def _middle_is_quiet(answer: Answer) -> str | None:
    for rank, one in enumerate(answer.evidence[1:-1], 1):
        if moved := sorted({c.name for c in one.calls if c.name != "barrier"}):
            return f"rank {rank} holds no copy of the matrix, yet it calls {', '.join(moved)}"
    return None


def _one_matrix(inputs: Inputs) -> float:
    return float(inputs[0]["grad"].nbytes)


_TIED = Exercise(
    "sync_tied",
    reference=_tied,
    cases=[
        Case("2 ranks", [{"grad": torch.tensor([[1.0, 2.0]])}, {"grad": torch.tensor([[10.0, 20.0]])}]),
        Case("other tensors on 2 ranks", _two_ends, hidden=True),
        Case("3 or 4 ranks: those between have nothing to sum", _ends, hidden=True),
        Case(
            "ranks without a copy stay silent",
            _ends,
            hidden=True,
            accept=[_middle_is_quiet, at_most("the size of the matrix", _one_matrix, "all_reduce", "send")],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [None if r["grad"] is None else t / 2 for r, t in zip(ranks, _tied(ranks), strict=True)],
            "Both are gradients of one matrix, from its two uses. They add up; nothing is divided.",
        ),
        Mistake(
            lambda ranks: [r["grad"] for r in ranks],
            "Each copy still has the gradient of its own use only; after one step the two matrices differ.",
        ),
    ],
    hint="Every rank calls dist.new_group([0, p-1]), also those that are not in it. Then the two members all-reduce; "
    "the others return what they have.",
)

# --------------------------------------------------------------------------------------- 8 who has survived


def survivors(got: torch.Tensor, grads: list[torch.Tensor]) -> list[int]:
    """Indices i with got = sum of grads[i]."""
    columns = torch.stack([g.flatten().double() for g in grads], dim=1)
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights.tolist()) if w > 0.5]


def _some(chosen: Callable[[Draw, int], Sequence[int]]) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        n, shape = draw.integer(3, 8), (draw.integer(5, 8), draw.integer(5, 8))
        grads = [draw.tensor(*shape) for _ in range(n)]
        picked = [grads[i] for i in chosen(draw, n)]
        return {"got": torch.stack(picked).sum(0), "grads": grads}

    return inputs


def _subset(draw: Draw, n: int) -> list[int]:
    return sorted(draw.random.sample(range(n), draw.integer(1, n - 1)))


_BASIS = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([-2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])]

_SURVIVORS = Exercise(
    "survivors",
    reference=survivors,
    cases=[
        Case("all three of three", {"got": torch.tensor([0.0, 2.0, 1.0]), "grads": _BASIS}),
        Case("the first and the last", {"got": torch.tensor([2.0, 1.0, 1.0]), "grads": _BASIS}),
        Case("nothing is lost", _some(lambda draw, n: range(n)), hidden=True),
        Case("only one is left", _some(lambda draw, n: [draw.integer(0, n - 1)]), hidden=True),
        Case("any of them", _some(_subset), points=2, hidden=True),
    ],
    mistakes=[
        Mistake(lambda got, grads: list(range(len(grads))), "You count them all. Some did not survive."),
        Mistake(lambda got, grads: [len(grads) - 1], "Not always the last one: find out which."),
        Mistake(
            lambda got, grads: [i for i, g in enumerate(grads) if torch.allclose(g, got)],
            "This finds a single survivor. Several may be in the sum.",
        ),
        Mistake(
            lambda got, grads: [i for i, g in enumerate(grads) if (g * got).sum() > 0],
            "A positive product is no proof: gradients are not orthogonal. Solve for all weights together.",
        ),
    ],
    hint="got = sum of w_i grads[i] with each w_i 0 or 1: a least-squares problem with a column for each microbatch.",
)

# ---------------------------------------------------------------------------------------------- 9 questions


def answers(
    p: int, m: int, v: int, layers: int, tokens: int, hidden: int, kept_bytes_per_token_and_layer: int
) -> dict[str, Any]:
    idle = Fraction(p - 1, v * m)
    warmup = min(m * v, p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p)
    kept = min(m * v, warmup + 1)
    per_chunk = layers // (p * v) * tokens * kept_bytes_per_token_and_layer
    return {
        "idle_share": float(idle / (1 + idle)),
        "microbatches_for_5_percent": -(-20 * (p - 1) // v),
        "kept_bytes_on_rank_0": kept * per_chunk,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


def _a_run(draw: Draw) -> dict[str, Any]:
    p, v = draw.choice([2, 4, 8]), draw.choice([1, 2, 4])
    return {
        "p": p, "m": p * draw.integer(2, 8), "v": v, "layers": p * v * draw.integer(1, 4),
        "tokens": 1024 * draw.integer(1, 8), "hidden": 256 * draw.integer(4, 32),
        "kept_bytes_per_token_and_layer": 34 * 256 * draw.integer(4, 32),
    }  # fmt: skip


def _changed(**changes: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def answer(**inputs: Any) -> dict[str, Any]:
        return {**answers(**inputs), **{key: change(**inputs) for key, change in changes.items()}}

    return answer


def _not_m(p: int, m: int, v: int, layers: int, tokens: int, kept_bytes_per_token_and_layer: int, **_: Any) -> int:
    return m * (layers // p) * tokens * kept_bytes_per_token_and_layer


_GPT3 = {
    "p": 8, "m": 64, "v": 1, "layers": 96, "tokens": 2048, "hidden": 12288,
    "kept_bytes_per_token_and_layer": 34 * 12288 // 8,
}  # fmt: skip

_QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("GPT-3 on 8 stages", _GPT3),
        Case("the same with 4 chunks a rank", {**_GPT3, "v": 4}),
        Case("another run", _a_run, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            _changed(idle_share=lambda p, m, v, **_: (p - 1) / (v * m)),
            "The share of *all* time is bubble / (1 + bubble).",
        ),
        Mistake(_changed(kept_bytes_on_rank_0=_not_m), "That is GPipe's memory. 1F1B keeps warm-up + 1 chunks, not m."),
        Mistake(
            _changed(bytes_between_ranks=lambda p, m, v, tokens, hidden, **_: (p * v - 1) * m * tokens * hidden * 2),
            "Activations go forward and gradients come back: twice.",
        ),
        Mistake(
            _changed(bytes_between_ranks=lambda p, m, v, tokens, hidden, **_: 2 * (p - 1) * m * tokens * hidden * 2),
            "With v chunks a microbatch crosses p*v - 1 borders, not p - 1.",
        ),
    ],
    hint="bubble = (p-1)/(vm). Its share of all time is bubble / (1 + bubble). Rank 0 keeps warm-up + 1 chunks of "
    "layers/(pv) layers. A microbatch crosses pv - 1 borders, there and back, 2 bytes a number.",
)

LAB = Lab(
    "03_pipeline_1f1b",
    [_PREDICT, _GPIPE, _1F1B, _INTERLEAVED, _STAGE, _ZB, _TIED, _SURVIVORS, _QUESTIONS],
)
