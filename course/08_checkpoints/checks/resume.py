"""Lab 08, resuming: a second process computes from a saved state the same bits as the first process would have.

Rank 0 trains, saves and trains on; its state travels as plain data, after it has trained on. Rank 1 is another process
with another seed, which has trained a step of its own; it loads the state and trains. The judge trains a third one and
saves nothing.
"""

from __future__ import annotations

from typing import Any

from course.lab08.small_run import Run
from labkit.checks import sends
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


def _straight(ranks: Inputs) -> list[dict[str, Any]]:
    r = ranks[0]
    run = Run(r["seed"], r["dropout"], r["decays"], r["rows"], r["batch"])
    run.train(r["at"])
    return [{"losses": run.train(r["after"]), "weights": run.weights()}] * len(ranks)


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
    reference=_straight,
    drive=_drive,
    rtol=0.0,
    atol=0.0,
    accept=[sends("broadcast", times=2)],
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
