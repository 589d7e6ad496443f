"""Lab 06, weights of ZeRO-3: a unit's weights are gathered before it runs, while the unit before runs, and freed after
it.

The learner's function drives units whose forward and backward the check provides. Each begins by taking a factor
(`late`). The evidence has this moment on the same clock as starts and waits, and so says what came before a unit ran:

| asked                                   | how it is seen                                                     |
|-----------------------------------------|--------------------------------------------------------------------|
| a unit's weights come before it runs    | values; there is no other way to get them                          |
| the next unit's travel meanwhile        | started before this unit's number is given, waited for after it    |
| not all of them at once                 | of later units only the next one's have started                    |
| weights are freed                       | when a unit runs, at most its own and the next one's are alive     |
| and not overwritten while they are used | the next one's, already asked for, do not come into their memory   |
| gradients leave as they come            | a reduce-scatter starts before the next backward, ends after it    |
| and do not pile up                      | when a unit runs backward, at most one is still on its way             |
| no whole model, of weights or gradients | bytes alive at once                                                |
"""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.checks import peak_at_most, sends
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]
# the mark: step, how many, their bytes, bytes of the next unit's if they lie apart, whether they lie where its own do
WHOLE = "whole"
MOST = 2


def _drive(exercise: Any, shards: Any, shapes: Any, x: Any, dy: Any, tiny: bool, group: Any = None) -> Any:
    import gc
    import weakref

    import torch as t

    seen: dict[int, Any] = {}  # memory of weights: a weak reference, by address
    whole_then: dict[int, Any] = {}  # of it what lived when the unit before ran
    seen_bytes: dict[int, int] = {}
    inputs: dict[int, Any] = {}
    units, place = len(shards), [0, 0]  # where the weights lie with which a unit runs

    def look() -> dict[int, Any]:
        return {key: one for key, one in seen.items() if (storage := one()) is not None and storage.nbytes()}

    def say(step: int, after: Any = None, over: bool = False) -> None:
        """Note which weights were whole at a step, and, when the next unit runs, whether its weights lie in other
        memory, and whether they lie over those of this unit."""
        apart = after is not None and not any(one() is after for one in whole_then.values())
        nbytes = sum(seen_bytes[key] for key in whole_then), after.nbytes() if apart else 0
        mark(f"whole {step} {len(whole_then)} {nbytes[0]} {nbytes[1]} {over:d}")  # type: ignore[name-defined]  # noqa: F821

    def begins(unit: int, whole: Any, step: int) -> float:
        storage, first = whole.untyped_storage(), whole.data_ptr()
        last = first + whole.nbytes
        if step:
            say(step - 1, storage, first < place[1] and place[0] < last)
        place[:] = first, last
        seen[storage._cdata], seen_bytes[storage._cdata] = weakref.ref(storage), storage.nbytes()
        if len(look()) > 1:
            gc.collect()  # what only a cycle holds is not kept by the program
        whole_then.clear()
        whole_then.update(look())
        return float(late(step))  # type: ignore[name-defined]  # noqa: F821

    def weight_of(unit: int, whole: Any) -> Any:
        rows, columns = shapes[unit]
        return whole.reshape(-1)[: rows * columns].view(rows, columns)

    def forward(unit: int, whole: Any, h: Any) -> Any:
        factor = begins(unit, whole, unit)
        z = h @ weight_of(unit, whole)
        inputs[unit] = h, z, factor
        return factor * (z if tiny else z.tanh())

    def backward(unit: int, whole: Any, grad: Any) -> Any:
        turned = begins(unit, whole, 2 * units - 1 - unit)
        h, z, factor = inputs.pop(unit)
        dz = turned * factor * grad * (1 if tiny else 1 - z.tanh() ** 2)
        flat = t.zeros_like(whole)
        weight_of(unit, flat).copy_(h.mT @ dz)
        return dz @ weight_of(unit, whole).mT, flat

    shards = [shard.contiguous() for shard in shards]  # as flat buffers are
    y, grads = exercise.forward_backward(shards, forward, backward, x, lambda out: dy * out, group)
    say(2 * units - 1)
    return {"y": y, "gradients": grads}


def _computed(ranks: Inputs) -> list[dict[str, Any]]:
    """y and the shards of the gradients, by autograd through the whole weights."""
    world, shapes, tiny = len(ranks), ranks[0]["shapes"], ranks[0]["tiny"]
    ys, each = [], []
    for r in ranks:
        params = [torch.cat(parts).requires_grad_() for parts in zip(*(one["shards"] for one in ranks), strict=True)]
        h = r["x"]
        for param, (rows, columns), forth, back in zip(params, shapes, r["factors"], r["factors"][::-1], strict=False):
            z = h @ param[: rows * columns].view(rows, columns)
            h = forth * (z if tiny else z.tanh())
            h.register_hook(lambda grad, back=back: grad * back)
        each.append(torch.autograd.grad(h, params, r["dy"] * h.detach()))
        ys.append(h.detach())
    sums = [torch.stack(grads).sum(0).chunk(world) for grads in zip(*each, strict=True)]
    return [{"y": y, "gradients": [parts[me] for parts in sums]} for me, y in enumerate(ys)]


def _moments(one: Evidence) -> list[int]:
    """The moments at which each unit ran: forward, then backward."""
    return [moment for text, moment in one.marks if text.startswith("late ")]


def _way(at: int, units: int) -> str:
    return f"{'forward' if at < units else 'backward'} of unit {min(at, 2 * units - 1 - at)}"


def _as_often_as_units_run(answer: Answer) -> str | None:
    units = len(answer.inputs[0]["shards"])
    for rank, one in enumerate(answer.evidence):
        if [text for text, _ in one.marks if text.startswith("late ")] != [f"late {i}" for i in range(2 * units)]:
            return f"rank {rank}: the units do not run once forward, from the first, and once backward, from the last"
        gathers, scatters = one.count("all_gather"), one.count("reduce_scatter")
        if gathers not in (2 * units, 2 * units - 1):
            few = ": weights that were let go of after the forward pass are gathered again" if gathers <= units else ""
            return (
                f"rank {rank} gathers {gathers} times; {units} units need {2 * units}, one less if the last stays{few}"
            )
        if scatters != units:
            return f"rank {rank} calls reduce_scatter {scatters} times for the gradients of {units} units"
    return None


def _let_go(answer: Answer) -> str | None:
    """Check that weights are freed. The next unit may reuse the memory of a unit that has run: two fixed buffers take
    turns."""
    for rank, (one, inputs) in enumerate(zip(answer.evidence, answer.inputs, strict=True)):
        units, item = len(inputs["shards"]), inputs["x"].itemsize
        largest = item * max(len(answer.inputs) * shard.numel() for shard in inputs["shards"])
        gathers, moments = [c for c in one.calls if c.name == "all_gather"], _moments(one)
        kept = 2 * units - len(gathers)  # 1 where the last unit's weights stay
        for text, _ in one.marks:
            if not text.startswith(f"{WHOLE} "):
                continue
            at, alive, nbytes, apart, over = map(int, text.split()[1:])
            mine = at if at < units else at - kept  # number of the gather of its weights
            stays = kept and at == units - 1  # its backward follows, with the same weights
            asked, way = sum(call.started < moments[at] for call in gathers) > mine + 1, _way(at, units)
            if over and asked and not stays:
                return (f"rank {rank}, {way}: while the unit runs, the weights of the next one travel into the memory "
                        "of its own: they are written over before they have been used")  # fmt: skip
            if apart and asked:
                alive, nbytes = alive + 1, nbytes + apart
            if (many := max(alive, math.ceil(nbytes / largest))) > MOST:
                return (f"rank {rank}, {way}: the whole weights of {many} units are still alive or on their way; "
                        f"{MOST} is the limit, its own and the next one's. Let go of a unit's weights when it has run, "
                        "before you ask for others")  # fmt: skip
    return None


def _prefetched(answer: Answer) -> str | None:
    for rank, (one, inputs) in enumerate(zip(answer.evidence, answer.inputs, strict=True)):
        gathers, moments, units = [c for c in one.calls if c.name == "all_gather"], _moments(one), len(inputs["shards"])
        kept = 2 * units - len(gathers)  # 1 where the last unit's weights stay
        for at, moment in enumerate(moments):
            way = f"rank {rank}, {_way(at, units)}"
            after = f"unit {min(at + 1, 2 * units - 2 - at)}, which runs next"
            mine = at if at < units else at - kept  # number of the gather of its weights
            started = sum(call.started < moment for call in gathers)
            turns = at in (units - 1, units)  # behind the last unit's forward comes its own backward
            if started < min(mine + 2, len(gathers)) and not (turns and at < units):
                return f"{way}: the weights of {after}, have not been asked for"
            if started > mine + 2:
                return f"{way}: {started - mine - 1} units' weights are on their way or here already; one is enough"
            ahead = gathers[mine + 1] if mine + 1 < len(gathers) and not (turns and at < units) else None
            if ahead is not None and ahead.waited is not None and ahead.waited < moment:
                return f"{way}: it has waited already for the weights of {after}: nothing is hidden"
    return None


def _gradients_leave(answer: Answer) -> str | None:
    for rank, (one, inputs) in enumerate(zip(answer.evidence, answer.inputs, strict=True)):
        scatters, units = [c for c in one.calls if c.name == "reduce_scatter"], len(inputs["shards"])
        back = _moments(one)[units:]
        for done, moment in enumerate(back[1:], 1):
            if sum(call.started < moment for call in scatters) < done:
                return (f"rank {rank}: the gradient of unit {units - done} has not left when unit {units - 1 - done} "
                        "runs backward")  # fmt: skip
            if sum(call.started < moment and (call.waited is None or call.waited > moment) for call in scatters) > 1:
                return (f"rank {rank}: the gradients of two units are still on their way when unit {units - 1 - done} "
                        "runs backward; wait for the one before when the next one leaves")  # fmt: skip
            call = scatters[done - 1]
            if call.waited is not None and call.waited < moment:
                return (f"rank {rank}: it waits for the reduce-scatter of unit {units - done} before unit "
                        f"{units - 1 - done} runs backward: nothing is hidden")  # fmt: skip
    return None


def _a_few_units(ranks: Inputs) -> float:
    """The bytes that are allowed: weights of two units, gradients of two, products, room, and the shards of all
    gradients."""
    item, r = ranks[0]["x"].itemsize, ranks[0]
    unit = max(len(ranks) * shard.numel() for shard in r["shards"])
    return float(item * (8.5 * unit + sum(shard.numel() for shard in r["shards"])))


def _units(draw: Draw, ranks: int, shapes: list[tuple[int, int]], tiny: bool = False, batch: int = 3) -> Inputs:
    found: Inputs = [
        {"shards": [], "shapes": shapes, "x": draw.tensor(batch, shapes[0][0]), "dy": draw.tensor(batch, shapes[-1][1]),
         "tiny": tiny, "factors": [draw.integer(8, 24) / 16 for _ in range(2 * len(shapes))]}
        for _ in range(ranks)
    ]  # fmt: skip
    for rows, columns in shapes:
        flat = torch.zeros(-(-rows * columns // ranks) * ranks)
        flat[: rows * columns] = 0.7 * draw.tensor(rows * columns) / rows**0.5
        for r, shard in zip(found, flat.chunk(ranks), strict=True):
            r["shards"].append(shard.clone())
    return found


def _some(draw: Draw) -> Inputs:
    widths = [draw.integer(2, 6) for _ in range(draw.integer(4, 6))]
    return _units(draw, draw.integer(2, 3), list(zip(widths, widths[1:], strict=False)))


def _odd(draw: Draw) -> Inputs:
    """Draw three ranks; no unit's size divides by three, and one unit has fewer elements than ranks."""
    return _units(draw, 3, [(2, 1), (1, 5), (5, 2), (2, 4)])


def _one_unit(draw: Draw) -> Inputs:
    return _units(draw, 2, [(3, 3)])


def _five(draw: Draw) -> Inputs:
    return _units(draw, 2, [(4, 4)] * 5)


def _large(draw: Draw) -> Inputs:
    """Draw 14 units of 16 KiB."""
    return _units(draw, 4, [(64, 64)] * 14, batch=1)


_TINY = [
    {"shards": [torch.tensor([2.0 + rank]), torch.tensor([5.0 + 2 * rank])], "shapes": [(1, 2), (2, 1)],
     "x": torch.tensor([[10.0**rank]]), "dy": torch.tensor([[1.0]]), "tiny": True, "factors": [1.0] * 4}
    for rank in range(2)
]  # fmt: skip


ON_USE = Exercise(
    "gather_on_use",
    reference=_computed,
    function="forward_backward",
    drive=_drive,
    late="factors",
    group="group",
    cases=[
        Case("2 ranks, weights [2, 3] and [5, 7]; x is 1 on rank 0, 10 on rank 1; gradient_of(y) is y", _TINY),
        Case("other units, of different sizes", _some, points=2, hidden=True, fixed=[_odd, _one_unit]),
        Case("weights are gathered on use and let go of", _some, points=2, hidden=True, fixed=[_five], accept=[
            sends("all_gather", "reduce_scatter"), _as_often_as_units_run, _let_go]),
        Case("the next unit's weights travel while this one computes", _some, points=2, hidden=True, fixed=[_five],
             accept=[_as_often_as_units_run, _prefetched, _gradients_leave]),
        Case("never the whole model, of weights or gradients", _large, hidden=True, accept=[
            peak_at_most("room for 8.5 units (weights, gradients, products) and the shards of all gradients",
                         _a_few_units)]),
    ],
    idea="At each unit: which weights must be here, which should be on their way, and which can go?",
    hint="ask(i): whole = new_empty(D * size of the shard), all_gather_into_tensor(whole, shard, async_op=True). "
    "Forward: wait for i, ask for i + 1, run i, drop i. The same backward from the last unit, where each gradient "
    "leaves by reduce_scatter_tensor(async_op=True); wait for the one before when the next one leaves, for the last "
    "at the end.",
)  # fmt: skip
