"""Lab 13, a state that passes from rank to rank: what came before a rank's tokens, in few rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from labkit.checks import every_wait_follows, sends
from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]


def state_before(ranks: Inputs) -> list[torch.Tensor]:
    """From rank to rank."""
    h, found = torch.zeros_like(ranks[0]["own"]).double(), []
    for one in ranks:
        found.append(h.to(one["own"].dtype))
        h = one["decay"].double()[:, None, None] * h + one["own"].double()
    return found


def _some(draw: Draw, cp: int = 0, none_left: bool = False) -> Inputs:
    """Draw decays between 0 and 1; with `none_left` those of two ranks are 0."""
    shape, cp = draw.shape(3, 2, 4), cp or draw.integer(3, 4)
    ranks: Inputs = [{"decay": draw.tensor(shape[0]).sigmoid(), "own": draw.tensor(*shape)} for _ in range(cp)]
    for one in ranks[1:3] if none_left else ():
        one["decay"].zero_()
    return ranks


def _by_hand(decays: list[float], own: list[float]) -> Inputs:
    return [
        {"decay": torch.tensor([decay]), "own": torch.tensor([[[u]]])} for decay, u in zip(decays, own, strict=True)
    ]


def rounds(size: int) -> int:
    return (size - 1).bit_length()


def _pair(inputs: Inputs) -> int:
    return int(inputs[0]["own"].nbytes + inputs[0]["decay"].nbytes)


def _few_rounds(answer: Answer) -> str | None:
    """Check how many messages stand one behind the other: one that leaves after another was waited for is behind it."""
    made = [one.calls for one in answer.evidence]
    numbered: dict[tuple[int, int, int], Any] = {}
    for rank, calls in enumerate(made):
        for peer in range(len(made)):
            out = [call for call in calls if call.name == "send" and call.peer == peer]
            numbered |= {(rank, peer, number): call for number, call in enumerate(out)}
    place: dict[tuple[int, int, int], int] = {}
    for key, call in sorted(numbered.items(), key=lambda item: item[1].started):
        come = dict.fromkeys(range(len(made)), 0)
        behind = [0]
        for other in (other for other in made[key[0]] if other.name == "recv"):
            if other.waited is not None and other.waited < call.started:
                behind.append(place.get((other.peer, key[0], come[other.peer]), 0))
            come[other.peer] = come.get(other.peer, 0) + 1
        place[key] = 1 + max(behind)
    most, few = max(place.values(), default=0), rounds(len(made))
    if most > few:
        return f"{most} messages stand one behind the other on {len(made)} ranks; {few} are enough"
    return None


BEFORE = Exercise(
    "state_before",
    reference=state_before,
    axis="cp",
    cases=[
        Case("the example: 0, 8, 6, 9 on 4 ranks", _by_hand([0.5, 0.25, 0.5, 1.0], [8.0, 4.0, 6.0, 1.0]),
             fixed=[_by_hand([0.5, 0.25], [8.0, 4.0])]),
        Case("up to 4 ranks", _some, points=2, hidden=True, fixed=[partial(_some, cp=3), partial(_some, cp=2)]),
        Case("5 ranks, on two of which nothing is left of an earlier state", partial(_some, cp=5, none_left=True),
             hidden=True),
        Case("7 ranks: three rounds, and no rank sends more than three states with their decays", partial(_some, cp=7),
             hidden=True, points=3, draws=1, fixed=[partial(_some, cp=4)], accept=[
                 sends("send", "recv", at_most=("a state and its decays a round", lambda i: rounds(len(i)) * _pair(i))),
                 _few_rounds, every_wait_follows]),
        Case("these ranks are a part of the world", partial(_some, cp=3), hidden=True),
    ],
    idea="What two neighbouring stretches of tokens make of a state, one pair can say. Which pair of the ranks before "
    "it does a rank know after one round, and which could it know after two?",
    hint="first, then second: (d2 d1, d2 u1 + u2). Keep two pairs: `whole` of the ranks up to this one, `before` of "
    "those before it, first (1, 0). With step 1, 2, 4, ...: send `whole` to rank + step, receive from rank - step, put "
    "what came before both. At the end u of `before` is the state.",
)  # fmt: skip
