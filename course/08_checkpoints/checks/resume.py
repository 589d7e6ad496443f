"""Lab 08, resuming: a second process computes from a saved state the same bits as the first process would have.

Rank 0 trains, saves and trains on; its state travels as plain data, after it has trained on. Rank 1 is another process
with another seed, which has trained a step of its own; it loads the state and trains. The judge trains a third one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from course.lab08.small_run import Run
from labkit import plain
from labkit.checks import count, only
from labkit.exercises import Case, Draw, Exercise

Inputs = list[dict[str, Any]]


def _drive(
    exercise: Any, seed: int, at: int, after: int, dropout: float, decays: bool, rows: int, batch: int
) -> Any:  # fmt: skip
    import torch as t
    import torch.distributed as dist

    from course.lab08.small_run import Run as SmallRun
    from labkit import plain as data

    rank = dist.get_rank()
    run = SmallRun(seed + rank, dropout, decays, rows, batch)
    size = t.zeros(1, dtype=t.int64)
    if rank == 0:
        run.train(at)
        state = exercise.save_state(run)
        losses = run.train(after)
        raw = t.tensor(list(data.dumps(state).encode()), dtype=t.uint8)
        size += len(raw)
    else:
        run.train(1)
    dist.broadcast(size, 0)
    if rank == 1:
        raw = t.empty(int(size), dtype=t.uint8)
    dist.broadcast(raw, 0)
    if rank == 1:
        exercise.load_state(run, data.loads(bytes(raw.tolist())))
        losses = run.train(after)
    return {"losses": losses, "weights": run.weights()}


def _saved(run: Run) -> dict[str, Any]:
    return {
        "weights": run.model.state_dict(), "moments": run.optimizer.state_dict(), "rate": run.scheduler.state_dict(),
        "dropout": torch.get_rng_state(), "order": run.data.order, "position": run.data.position,
        "generator": run.data.generator.get_state(),
    }  # fmt: skip


def _resumed(
    ranks: Inputs, forgotten: str = "", aliased: bool = False, then: Callable[[Run, int], Any] | None = None,
    saving: Callable[[Run], Any] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The results of both ranks, and mistakes.

    Args:
        forgotten: a part of the state that is not loaded.
        aliased: the state is that of a later step.
        then: what is done to the run after loading.
        saving: what is done to the saved run when it is copied.
    """
    r = ranks[0]
    made = {name: r[name] for name in ("dropout", "decays", "rows", "batch")}
    first = Run(r["seed"], **made)
    first.train(r["at"])
    state = _saved(first) if aliased else copy.deepcopy(_saved(first))
    if saving:
        saving(first)
    straight = {"losses": first.train(r["after"]), "weights": first.weights()}
    state = plain.loads(plain.dumps(state))
    second = Run(r["seed"] + 1, **made)
    second.train(1)
    parts = [
        ("weights", lambda: second.model.load_state_dict(state["weights"])),
        ("moments", lambda: second.optimizer.load_state_dict(state["moments"])),
        ("rate", lambda: second.scheduler.load_state_dict(state["rate"])),
        ("dropout", lambda: torch.set_rng_state(state["dropout"])),
        ("order", lambda: setattr(second.data, "order", state["order"])),
        ("position", lambda: setattr(second.data, "position", state["position"])),
        ("generator", lambda: second.data.generator.set_state(state["generator"])),
    ]
    for name, load in parts:
        if name not in forgotten.split():
            load()
    if then:
        then(second, r["seed"])
    return [straight, {"losses": second.train(r["after"]), "weights": second.weights()}]


def _both(seed: int, at: int = 3, after: int = 4, dropout: float = 0.0, decays: bool = False, rows: int = 1,
          batch: int = 1) -> Inputs:  # fmt: skip
    one = {"seed": seed, "at": at, "after": after, "dropout": dropout, "decays": decays, "rows": rows, "batch": batch}
    return [dict(one), dict(one)]


def _falling(draw: Draw) -> Inputs:
    """Draw a schedule that falls every third step. Rank 1 has made one step; after 1, 4, 7, ... steps its own count
    would be right by chance."""
    return _both(draw.integer(1, 99), at=draw.choice([2, 3, 5, 6]), decays=True)


def _with_dropout(draw: Draw) -> Inputs:
    return _both(draw.integer(1, 99), at=draw.integer(2, 5), dropout=0.5)


def _within_an_epoch(draw: Draw) -> Inputs:
    """Draw a run that saves after two of the three steps of a later epoch (six rows by two); rank 1 has made one
    step."""
    return _both(draw.integer(1, 99), at=draw.choice([5, 8]), after=6, rows=6, batch=2)


def _all(draw: Draw) -> Inputs:
    return _both(draw.integer(1, 99), draw.choice([2, 3, 6]), 7, 0.3, True, 8, 2)


RESUME = Exercise(
    "resume",
    reference=_resumed,
    drive=_drive,
    rtol=0.0,
    atol=0.0,
    accept=[only("broadcast"), count("broadcast", 2)],
    cases=[
        Case("one row of data, no dropout, a rate that stays", _both(5), points=2),
        Case("a rate that falls", _falling, hidden=True),
        Case("dropout", _with_dropout, hidden=True),
        Case("saved in the middle of an epoch, gone on into the next", _within_an_epoch, points=2, hidden=True),
        Case("all of it", _all, hidden=True),
    ],
    errors={
        "DataError": "A state is plain data: numbers, texts, lists, dicts and tensors.",
        "plain data": "A state is plain data: numbers, texts, lists, dicts and tensors.",
        "which a check cannot read": "A state is plain data: numbers, texts, lists, dicts and tensors.",
    },
    idea="Go through one step and write down everything that it reads and changes. What of it would another process "
    "not know?",
    hint="Save copies of the state dicts of model, optimizer and scheduler, torch's get_rng_state(), and of the data "
    "order, position and generator's get_state(). Load each where it came from: load_state_dict, set_rng_state, "
    "set_state; order and position are attributes.",
)  # fmt: skip
