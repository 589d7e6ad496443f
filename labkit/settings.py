"""The settings in which a lab's exercises are tried: turns cases into trials.

The problem in a sentence: an answer that ignores its group, takes for granted that tensors are contiguous, or computes
in float32 whatever it is given, is right in every case that an author thinks of.

So the author writes cases, and each exercise on ranks is tried in these settings automatically:

| setting  | in that trial                                                             | finds                        |
|----------|---------------------------------------------------------------------------|------------------------------|
| strided  | tensors are views of transposed or larger buffers, with the same values   | `view`, raw collectives      |
| double   | float32 inputs are float64, and so is the answer                          | buffers of a fixed dtype     |
| smaller  | the n ranks are in a larger world, not first; the others only stand by    | `dist.get_rank()`,           |
|          | (exercises with a `group` or an `axis`)                                   | a forgotten `group=`         |
| (always) | afterwards all ranks meet, and make one more group (`labkit.placing`)     | groups made by their members |

Visible trials are plain. Which hidden trial has which setting depends on the exercise's cases alone, never on the seed:
strided and double go to those whose case has no `accept` of its own, if there are some; smaller to the last. So
the same text meets the same settings in each grading. If a trial fails, the judge tries its inputs once more without
the setting, and names the setting if that is right: "with inputs that are not contiguous: ...".
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise, Inputs
from minimegatron.errors import ConfigError

CHEAP_DRAWS = 3
# Places of n ranks in a larger world, never the first n: (ranks, world).
_PLACES: dict[int, list[tuple[tuple[int, ...], int]]] = {
    1: [((1,), 2)],
    2: [((1, 2), 3), ((0, 2), 3), ((1, 3), 4)],
    3: [((0, 2, 3), 4), ((1, 2, 3), 4)],
    4: [((0, 2, 3, 4), 5), ((1, 2, 3, 4), 5)],
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one trial differs from the plain call."""

    strided: bool = False
    double: bool = False
    smaller: bool = False

    @property
    def said(self) -> str:
        """The setting in words for the learner; "" for a plain trial."""
        parts = [
            "inputs of float64" * self.double,
            "inputs that are not contiguous" * self.strided,
            "a group smaller than the world" * self.smaller,
        ]
        named = [part for part in parts if part]
        return f"with {' and '.join(named)}" if named else ""


PLAIN = Setting()


@dataclasses.dataclass(frozen=True)
class Trial:
    """One call of the learner's function.

    Attributes:
        given: the inputs of the case.
        setting: how they are passed.
        members: on ranks, the ranks of the world that the inputs go to, in order.
        world: number of ranks, including those that only stand by; 0 for a plain call.
        groups: (name, whether it is an `Axis`, lists of places in `members`) of each group that is passed.
    """

    given: Inputs
    setting: Setting = PLAIN
    members: tuple[int, ...] = ()
    world: int = 0
    groups: Sequence[tuple[str, bool, list[list[int]]]] = ()

    @property
    def inputs(self) -> Any:
        """A copy of the function's inputs, for code that may change it; without groups."""
        return _doubled(self.given) if self.setting.double else copy.deepcopy(self.given)

    def to_plain(self) -> dict[str, Any]:
        """The trial as plain data, for the player."""
        return {
            "inputs": self.inputs, "strided": self.setting.strided, "members": list(self.members),
            "world": self.world, "groups": [list(group) for group in self.groups],
        }  # fmt: skip


def trials(asked: Exercise, seed: str) -> list[list[Trial]]:
    """The trials of each case, in the order in which they are tried."""
    given = [_given(asked, case, f"{seed}/{asked.name}/{index}") for index, case in enumerate(asked.cases)]
    settings = _settings(asked, given)
    return [
        [
            place(asked, one, settings.get((index, number), PLAIN), f"{asked.name}/{index}/{number}")
            for number, one in enumerate(inputs)
        ]
        for index, inputs in enumerate(given)
    ]


def place(asked: Exercise, given: Inputs, setting: Setting, key: str) -> Trial:
    """The trial of these inputs in this setting; `key` chooses the place of a smaller group."""
    if not isinstance(given, list):
        return Trial(given, setting)
    n = len(given)
    members, world = tuple(range(n)), n
    if setting.smaller:
        places = _PLACES.get(n) or [(tuple(range(1, n + 1)), n + 1)]
        members, world = places[zlib.crc32(key.encode()) % len(places)]
    groups = []
    for name, as_axis, split in asked.groups:
        parts = [list(part) for part in split(copy.deepcopy(given))] if split else [list(range(n))]
        if sorted(rank for part in parts for rank in part) != list(range(n)):
            raise ConfigError(f"the groups of `{name}` are {parts}", fix=f"each of {n} ranks is in one of them")
        groups.append((name, as_axis, parts))
    return Trial(given, setting, members, world, groups)


def draws_of(asked: Exercise, case: Case, on_ranks: bool) -> int:
    """How many times a case is drawn: several where a trial costs no process and no compiler."""
    if not case.hidden or not callable(case.inputs):
        return 1
    if case.draws is not None:
        return case.draws
    return 1 if on_ranks or asked.prepare or asked.drive else CHEAP_DRAWS


def _given(asked: Exercise, case: Case, seed: str) -> list[Inputs]:
    """The inputs of all trials: those that the case shows, those that are fixed, those that are drawn."""
    first = case.draw(seed)
    fixed = [one(Draw(f"{case.what}/{i}")) if callable(one) else one for i, one in enumerate(case.fixed)]
    more = range(1, draws_of(asked, case, isinstance(first, list)))
    drawn = [first, *(case.draw(f"{seed}/{number}") for number in more)]
    if len({isinstance(one, list) for one in (*fixed, *drawn)}) > 1:
        raise ConfigError(f"some of `{case.what}` runs on ranks, some does not", where=asked.name)
    return [*fixed, *drawn] if case.hidden else [*drawn, *fixed]


def _settings(asked: Exercise, given: Sequence[Sequence[Inputs]]) -> dict[tuple[int, int], Setting]:
    """{(case, trial): setting} of the hidden trials on ranks that are not plain."""
    hidden = [
        (index, number)
        for index, inputs in enumerate(given)
        if asked.cases[index].hidden
        for number, one in enumerate(inputs)
        if isinstance(one, list)
    ]
    if not hidden:
        return {}
    free = [at for at in hidden if not asked.cases[at[0]].accept]
    values = [at for at in free if at != hidden[-1]] or free or hidden
    wanted = [("strided", values[0])]
    if torch.float64 in asked.dtypes:
        wanted.append(("double", values[1 % len(values)]))
    if asked.groups:
        wanted.append(("smaller", hidden[-1]))
    found: dict[tuple[int, int], Setting] = {}
    for name, at in wanted:
        found[at] = dataclasses.replace(found.get(at, PLAIN), **{name: True})
    return found


def _doubled(value: Any) -> Any:
    """A copy with float64 in place of float32."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64) if value.dtype == torch.float32 else value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_doubled(item) for item in value)
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    return copy.deepcopy(value)
