"""Lab 03, the executor: stages that keep a graph, lists that run on ranks, and messages that cross.

`execute` gets stages of the judge: y = x W, with the loss half the sum of the squares of the last output, so that the
gradient of that output is the output itself. They refuse to do what the list does not have next, and mark what they
begin. When a receive was posted, and how many sends are under way, is read off the communications of each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import every_wait_follows, sends
from labkit.exercises import Answer, Case, Draw, Exercise
from minimegatron.parallel.pipeline.actions import Action, Schedule, round_robin, schedule_from_text
from minimegatron.parallel.pipeline.schedules import build_schedule

Inputs = list[dict[str, Any]]

# --------------------------------------------------------------------------------------- a stage that keeps a graph


def _drive_graph(
    exercise: Any, weight: Any, xs: Any, dys: Any, order: str, end: str, beside: bool = False
) -> dict[str, Any]:
    """Run a stage of y = x @ weight through an order; `end` is "first", "last" or neither. With `beside` a second stage
    on this rank takes the same steps with other numbers."""
    import torch as t

    w = t.nn.Parameter(weight)

    def function(i: int, x: Any) -> Any:
        if (x is None) != (end == "first"):
            raise ValueError(f"the stage's function gets {'no' if x is None else 'an'} input of microbatch {i} here")
        y = (xs[i] if end == "first" else x) @ w
        return (y * y).sum() / 2 if end == "last" else y

    stage = exercise.stage = exercise.GraphStage(function)  # the module holds it: what it keeps is alive after the call
    theirs = t.nn.Parameter(-weight)
    other = exercise.GraphStage(lambda i, x: x @ theirs) if beside else None
    ys, dxs = {}, {}
    for word in order.split():
        i = int(word[1:])
        if word[0] == "F":
            y = stage.forward(i, None if end == "first" else xs[i].clone())
            if y.requires_grad:
                raise ValueError("forward returns a tensor with its graph: what is sent is a plain tensor of numbers")
            ys[i] = y.clone()
            del y
        else:
            dx = stage.backward(i, None if end == "last" else dys[i])
            dxs[i] = None if dx is None else dx.detach().clone()
            del dx
        if other is not None:
            try:
                other.forward(i, 2 * xs[i]) if word[0] == "F" else other.backward(i, -dys[i])
            except Exception:  # what it does to this stage is seen here
                other = None
    lists = [[one.get(i) for i in range(len(xs))] for one in (ys, dxs)]
    return {"y": lists[0], "dx": lists[1], "grad": t.zeros_like(weight) if w.grad is None else w.grad.detach()}


def _graph(weight: torch.Tensor, xs: list, dys: list, order: str, end: str, beside: bool = False) -> dict[str, Any]:
    w = weight.double()
    done = {kind: [int(word[1:]) for word in order.split() if word[0] == kind] for kind in "FB"}
    outs = [x.double() @ w for x in xs]
    dy = outs if end == "last" else [one.double() for one in dys]
    ys: list[Any] = [None] * len(xs)
    dxs, grad = [*ys], torch.zeros_like(w)
    for i in done["F"]:
        ys[i] = ((outs[i] ** 2).sum() / 2 if end == "last" else outs[i]).to(weight.dtype)
    for i in done["B"]:
        dxs[i] = None if end == "first" else (dy[i] @ w.T).to(weight.dtype)
        grad += xs[i].double().T @ dy[i]
    return {"y": ys, "dx": dxs, "grad": grad.to(weight.dtype)}


def _microbatches(
    order: str, end: str = "", rows: int = 3, wide: int = 0, **more: bool
) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        n, (a, b) = 1 + max(int(word[1:]) for word in order.split()), draw.shape(2, 2, 5)
        b = wide or b
        drawn = {"xs": [draw.tensor(rows, a) for _ in range(n)], "dys": [draw.tensor(rows, b) for _ in range(n)]}
        return {"weight": draw.tensor(a, b), **drawn, "order": order, "end": end, **more}

    return inputs


def _outputs_gone(answer: Answer) -> str | None:
    """Check what is kept: after forwards alone less than the inputs and one output, after the backwards nothing."""
    inputs, kept = answer.inputs, answer.evidence[0].alive
    n, out = len(inputs["xs"]), inputs["dys"][0].nbytes
    if "B" not in inputs["order"] and kept >= sum(x.nbytes for x in inputs["xs"]) + out:
        return (
            f"after {n} forwards {kept} bytes are kept; an output has {out}, has been sent, and is not read again. "
            "Keep its place in the graph, not its numbers"
        )
    if "B" in inputs["order"] and kept > inputs["weight"].nbytes:
        return f"after the last backward {kept} bytes of the microbatches are still kept"
    return None


_HAND = {
    "weight": torch.tensor([[2.0]]), "xs": [torch.tensor([[1.0]]), torch.tensor([[10.0]])],
    "dys": [torch.tensor([[3.0]]), torch.tensor([[5.0]])], "order": "F0 F1 B0 B1", "end": "",
}  # fmt: skip

GRAPH_STAGE = Exercise(
    "graph_stage",
    function="GraphStage",
    drive=_drive_graph,
    reference=_graph,
    cases=[
        Case("weight 2, inputs 1 and 10, gradients 3 and 5", _HAND),
        Case("other stages, also the first and the last of a pipeline", _microbatches("F0 F1 B0 F2 B1 B2"),
             hidden=True, fixed=[_microbatches("F0 F1 F2 B2 B1 B0"), _microbatches("F0 F1 B0 B1 F0 B0"),
                                 _microbatches("F0 F1 B1 B0", beside=True),
                                 _microbatches("F0 F1 B0 B1", "first"), _microbatches("F0 F1 B0 B1", "last")]),
        Case("an output that was sent is not kept", _microbatches("F0 F1 F2 F3", rows=8, wide=64),
             points=2, hidden=True, accept=[_outputs_gone],
             fixed=[_microbatches("F0 F1 F2 B0 B1 B2 F0 B0", rows=256)]),
    ],
    errors={
        "does not require grad": "Nothing between this input and the output records a graph: the input of a stage "
        "comes out of a message, and has none.",
        "'NoneType' object has no attribute 'grad'": "On the first stage of a pipeline the input is None, and "
        "`backward` returns None.",
        "Mismatch in shape": "torch.autograd.backward compares the shape of dy with that of y: emptying y is refused. "
        "Keep the edge that stands for y.",
    },
    idea="A tensor from a message has no graph, and its gradient is wanted. And which of y's two parts, its numbers or "
    "its graph, does the backward need?",
    hint="forward: x = x.detach().requires_grad_() (unless it is None), y = function(i, x); keep x and "
    "torch.autograd.graph.get_gradient_edge(y); return y.detach(). backward: take both out, "
    "torch.autograd.backward(edge, dy), return x.grad, or None where x is.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- the executor


def _drive_execute(exercise: Any, words: Any, weights: Any, batch: Any) -> list[Any]:
    """Run the list with stages that refuse another order; returns the gradients by chunk."""
    import torch as t
    import torch.distributed as dist

    rank, p, v = dist.get_rank(), dist.get_world_size(), len(weights)
    todo = [word if "." in word else f"{word}.0" for word in words]
    did: list[str] = []

    class Stage:
        def __init__(self, c: int, weight: Any) -> None:
            self.c, self.weight, self.grad = c, weight, t.zeros_like(weight)
            self.kept: dict[int, tuple[Any, Any]] = {}
            self.first, self.last = c * p + rank == 0, c * p + rank == p * v - 1

        def begin(self, kind: str, i: int, x: Any, end: bool) -> None:
            word = f"{kind}{i}.{self.c}"
            mark(word)  # type: ignore[name-defined]  # noqa: F821  given by the player
            if kind != "W" or word in todo:
                due = todo[len(did)] if len(did) < len(todo) else "nothing"
                if word != due:
                    raise ValueError(f"{word} is done where the list has {due}")
                did.append(word)
            if kind != "W" and (x is None) != end:
                raise ValueError(f"{word} gets {'no input' if x is None else 'an input'} on this rank")

        def forward(self, i: int, x: Any) -> Any:
            self.begin("F", i, x, self.first)
            x = batch[i] if self.first else x
            self.kept[i] = x, None
            y = x @ self.weight
            self.kept[i] = x, y if self.last else None
            return y

        def backward(self, i: int, dy: Any) -> Any:
            self.begin("B", i, dy, self.last)
            x, y = self.kept[i]
            dy = y if self.last else dy
            self.kept[i] = x, dy
            return dy @ self.weight.T

        def weights(self, i: int) -> None:
            self.begin("W", i, None, True)
            x, dy = self.kept.pop(i)
            self.grad += x.T @ dy

    stages = [Stage(c, weight) for c, weight in enumerate(weights)]
    exercise.execute(words, stages, t.empty(batch[0].shape, dtype=batch.dtype))
    if len(did) < len(todo):
        raise ValueError(f"execute returns before {todo[len(did)]}")
    if left := [f"W{i}.{one.c}" for one in stages for i in one.kept]:
        raise ValueError(f"execute returns, and `weights` was never called for {left[0]}")
    return [one.grad for one in stages]


def _serial(ranks: Inputs) -> list[Any]:
    """The gradients of one process that runs all stages, in float64."""
    p, v = len(ranks), len(ranks[0]["weights"])
    stages = [ranks[s % p]["weights"][s // p] for s in range(p * v)]
    weights = [w.double().requires_grad_() for w in stages]
    x = ranks[0]["batch"].double()
    for w in weights:
        x = x @ w
    ((x * x).sum() / 2).backward()
    grads = [w.grad.to(like.dtype) for w, like in zip(weights, stages, strict=True) if w.grad is not None]
    return [[grads[c * p + r] for c in range(v)] for r in range(p)]


def _lists(name: str, p: int, m: int, v: int = 1) -> Schedule:
    return build_schedule(name, p, m, v) if v > 1 else build_schedule(name, p, m)


def _reversed(p: int, m: int) -> Schedule:
    """GPipe as in its paper: the last microbatch goes back first."""
    row = [*(f"F{i}" for i in range(m)), *(f"B{i}" for i in reversed(range(m)))]
    return schedule_from_text("gpipe", [row] * p)


def _run(schedule: Schedule, rows: int = 2, n: int = 3) -> Callable[[Draw], Inputs]:
    """Inputs of every rank; the batch is the same on all."""

    def inputs(draw: Draw) -> Inputs:
        batch = draw.tensor(schedule.m, rows, n)
        return [
            {
                "words": [schedule.label(a) for a in row],
                "weights": [draw.tensor(n, n) / n**0.5 for _ in range(schedule.v)],
                "batch": batch,
            }
            for row in schedule.actions
        ]

    return inputs


def _schedule(answer: Answer) -> Schedule:
    rows = [one["words"] for one in answer.inputs]
    return schedule_from_text("asked", rows, round_robin(len(rows), len(answer.inputs[0]["weights"])))


def _posted_ahead(answer: Answer) -> str | None:
    """Check that the receive of an action is posted before the rank begins the action ahead of it, and not long
    before."""
    schedule = _schedule(answer)
    for rank, one in enumerate(answer.evidence):
        begun = {text: time for text, time in one.marks}
        posted = sorted(call.started for call in one.calls if call.name == "recv")
        needed, before = 0, None
        for action in schedule.actions[rank]:
            if schedule.input_of(rank, action):
                needed += 1
                by_then = before is None or sum(t < begun[str(before)] for t in posted) >= needed
                if not by_then:
                    return (
                        f"rank {rank} posts the receive for {schedule.label(action)} only after it has begun "
                        f"{schedule.label(before or action)}, so the message cannot travel meanwhile"
                    )
            before = action
    return None


def _few_under_way(answer: Answer) -> str | None:
    """Check that the sends, and the receives, that are under way do not grow with the number of microbatches."""
    p = len(answer.inputs)
    for rank, one in enumerate(answer.evidence):
        for name, what in (("send", "begun"), ("recv", "posted")):
            mine = [call for call in one.calls if call.name == name]
            moments = [(call.started, 1) for call in mine] + [(call.waited or call.started, -1) for call in mine]
            under_way = most = 0
            for _, change in sorted(moments):
                under_way += change
                most = max(most, under_way)
            if most > 2 * p:
                return (
                    f"rank {rank}: {most} {'sends' if name == 'send' else 'receives'} are under way at a time, {what} "
                    f"and not yet waited for; at most 2p = {2 * p} are asked for, however many microbatches there are"
                )
    return None


def _lets_go(answer: Answer) -> str | None:
    """Check that the most bytes at a time are those of the activations that 1F1B keeps, and of a few messages."""
    p, one = len(answer.inputs), answer.inputs[0]["batch"][0].nbytes
    for rank, evidence in enumerate(answer.evidence):
        bound = (2 * (p - rank) + 2 * p + 6) * one
        if evidence.peak > bound:
            return (
                f"rank {rank} holds {evidence.peak} bytes at once; {bound} are the activations of 1F1B and {2 * p + 6} "
                "messages. Let go of a tensor when its send has been waited for"
            )
    return None


_TWO = [
    {"words": "F0 F1 B0 B1".split(), "weights": [torch.tensor([[2.0]])], "batch": torch.tensor([[[1.0]], [[10.0]]])},
    {"words": "F0 F1 B0 B1".split(), "weights": [torch.tensor([[3.0]])], "batch": torch.tensor([[[1.0]], [[10.0]]])},
]

EXECUTE = Exercise(
    "execute",
    drive=_drive_execute,
    reference=_serial,
    accept=[sends("send", "recv"), every_wait_follows],
    without=("minimegatron.parallel", "minimegatron.comm"),
    seconds=30.0,
    rtol=1e-3,  # sums of up to 24 x 64 products in float32, some of which cancel, in another order than the reference's
    atol=1e-3,
    cases=[
        Case("two ranks, F0 F1 B0 B1, weights 2 and 3", _TWO, points=2),
        Case("1F1B, and GPipe whose last microbatch goes back first", _run(_lists("1f1b", 3, 6)), points=2, hidden=True,
             draws=1, fixed=[_run(_reversed(3, 4)), _run(_lists("1f1b", 3, 2))]),
        Case("ZB-H1: a list with W", _run(_lists("zb_h1", 3, 5)), hidden=True, draws=1),
        Case("two chunks a rank, on two ranks: both kinds of messages between the same two",
             _run(_lists("interleaved", 2, 6, 2)), points=2, hidden=True, draws=1,
             fixed=[_run(_lists("interleaved", 2, 2, 3))]),
        Case("the next receive is posted before the action in hand begins", _run(_lists("1f1b", 3, 6)), hidden=True,
             draws=1, accept=[_posted_ahead], fixed=[_run(_lists("zb_h1", 3, 5))], errors={
                "only after it has begun": "A receive is posted here when its word is next, or later. Until then its "
                "message cannot travel: post for the next word before you compute this one."}),
        Case("messages under way, and memory, do not grow with m", _run(_lists("1f1b", 3, 24), rows=64, n=16),
             hidden=True, draws=1, accept=[_few_under_way, _lets_go], errors={
                "sends are under way": "The waits for the sends come too late, most of them at the end. Before a rank "
                "sends again, it can wait for an earlier send.",
                "receives are under way": "Receives are posted long before they are needed, and each holds a buffer. "
                "One word ahead is enough.",
                "bytes at once": "Something keeps tensors that nobody needs any more, such as an output whose send "
                "has been waited for, or an input that the stage has got."}),
    ],
    errors={
        "killed by SIGABRT": "A message is larger than the buffer of its receive, which ends the process. A buffer has "
        "the shape and the dtype of `like`.",
        "deadlock": "A receive waits for ever where no rank sends the message with its tag. A send is over when its "
        "receiver has posted, which a rank that waits does not do. Is a line such a wait, or a blocking call?",
        "there is no rank": "The ranks form a ring: behind the last one comes rank 0.",
        "isend to self": "A stage is sought on this rank: its neighbours are on the ranks before and behind this one.",
    },
    idea="Write down for one rank which of its words receive, and from whom; then which send, and to whom. Only the "
    "two ends of the whole pipeline are without.",
    hint="Number the stages: chunk c of rank r is stage cp + r. F receives from rank r-1 unless its stage is 0, and "
    "sends to r+1 unless it is the last; B the other way round, all modulo p. post(k): torch.empty_like(like) and "
    "irecv, kept under k. In step k: post(k+1), wait for k's own receive, compute, then wait for the last send of this "
    "kind, and isend. A B without W calls `weights` after its send. At the end wait for the sends that are left.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- crossed


def crossed(rank: int, sent: list[str], posted: list[str]) -> list[tuple[str, str]]:
    """Return (the word that a receive was posted for, the word whose input came) where they differ."""

    def on_this_rank(word: str) -> str:
        action = Action.parse(word)
        stage = 2 * action.chunk + (1 - rank) + (1 if action.kind == "F" else -1)
        return str(Action(action.kind, action.microbatch, stage // 2))

    return [(wanted, came) for wanted, came in zip(posted, map(on_this_rank, sent), strict=True) if wanted != came]


def _log(m: int, v: int, rank: int, fused: bool = True) -> dict[str, Any]:
    """What two ranks of an interleaved list would log; fused: a pair of F and B is sent together, B first."""
    schedule = _lists("interleaved", 2, m, v)
    other, order = 1 - rank, list[Action]()
    row = schedule.actions[other]
    for at, action in enumerate(row):
        back = action.kind == "B" and at and row[at - 1].kind == "F"
        order.insert(len(order) - (1 if fused and back else 0), action)
    sent = [str(a) for a in order if schedule.output_of(other, a)]
    posted = [str(a) for a in schedule.actions[rank] if schedule.input_of(rank, a)]
    return {"rank": rank, "sent": sent, "posted": posted}


def _mixed(draw: Draw) -> dict[str, Any]:
    """A log in which a few neighbours have changed places."""
    log = _log(2 * draw.integer(2, 5), draw.integer(2, 4), draw.integer(0, 1), fused=False)
    for _ in range(draw.integer(1, 3)):
        at = draw.integer(1, len(log["sent"]) - 1)
        log["sent"][at - 1 : at + 1] = log["sent"][at - 1 : at + 1][::-1]
    return log


def _of_one_kind(m: int, v: int, rank: int) -> dict[str, Any]:
    """A log in which two forwards, or two backwards, have changed places."""
    log = _log(m, v, rank, fused=False)
    sent = log["sent"]
    at = next(i for i in range(1, len(sent)) if sent[i][0] == sent[i - 1][0])
    sent[at - 1 : at + 1] = sent[at - 1 : at + 1][::-1]
    return log


_SHORT = {"rank": 0, "sent": ["F0.0", "B0.1", "F1.0", "B0.0"], "posted": ["F0.1", "F1.1", "B0.1", "B0.0"]}

CROSSED = Exercise(
    "crossed",
    reference=crossed,
    cases=[
        Case("four messages from rank 1 to rank 0", _SHORT),
        Case("nothing has crossed", _log(4, 2, 0, fused=False), hidden=True, fixed=[_log(4, 3, 1, fused=False)]),
        Case("what rank 0 receives", _log(6, 2, 0), hidden=True, fixed=[_log(4, 3, 0), _log(12, 2, 0)]),
        Case("what rank 1 receives", _log(6, 2, 1), hidden=True, fixed=[_log(4, 3, 1)]),
        Case("other logs", _mixed, hidden=True,
             fixed=[_log(8, 2, 0), _log(8, 2, 1), _of_one_kind(6, 2, 1)]),
    ],
    idea="The sender's words are those of *its* chunks. Which word of the receiver does each of them feed?",
    hint="With two ranks stage s is chunk s // 2 of rank s % 2. From rank 1, F3.0 (stage 1) feeds F3.1 of rank 0 "
    "(stage 2); from rank 0 it feeds F3.0 of rank 1. Backwards: from rank 1, B3.1 feeds B3.1 of rank 0; from rank 0 it "
    "feeds B3.0 of rank 1. Then pair the k-th send with the k-th receive, and return the pairs that differ.",
)  # fmt: skip
