"""The learner's side of a trial's setting: groups, tensors that are not contiguous, and what must hold afterwards.

    meeting = Meeting(seconds)            all ranks of the world, those that only stand beside included
    given = groups_of(job, rank)          {"group": <ProcessGroup>}, made by all ranks
    meeting.begin()
    ...                                   the learner's call, on the group's ranks
    meeting.end(given)                    all ranks are back, can still talk in every group, and can make another

A collective that one rank has started and another has not, a group that only its members have made: both leave the
ranks out of step, and hang the *next* program. `end` finds them. What torch offers is taken before the learner's code
is imported, which may patch it.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit import plain
from minimegatron.comm.axis import Axis

_barrier, _new_group, _all_gather, _sleep, _now = (
    dist.barrier, dist.new_group, dist.all_gather, time.sleep, time.monotonic
)  # fmt: skip
_dumps, _sha256 = plain.dumps, hashlib.sha256


class OutOfStep(Exception):
    """After the learner's call the ranks no longer do the same; `hangs` where that was found by waiting."""

    def __init__(self, what: str, hangs: bool) -> None:
        super().__init__(what)
        self.hangs = hangs


class Meeting:
    """All ranks of a trial, before and after the learner's call.

    Args:
        seconds: that the learner's call may take.
    """

    def __init__(self, seconds: float) -> None:
        self._patience = datetime.timedelta(seconds=seconds + 10)
        self._agree_seconds = 0.4 * seconds  # when all ranks are there, what has not ended by then never ends
        self._group = _new_group(timeout=self._patience)

    def begin(self) -> None:
        """Wait for all: one that fails at once and goes must not leave another in the middle of connecting to it."""
        _barrier(self._group)

    def end(self, given: Mapping[str, Any]) -> None:
        """Wait for all; then every group must still work, and a further one.

        Raises:
            OutOfStep: they do not; with a sentence.
        """
        _barrier(self._group)
        self._same_groups()
        groups = {"the world": dist.group.WORLD}
        groups.update({f"the group of `{name}`": getattr(one, "group", one) for name, one in given.items()})
        for name, group in groups.items():
            if group is not None:
                self._agree(group, f"in {name}")
        self._agree(_new_group(timeout=self._patience), "in a further group")

    def _same_groups(self) -> None:
        mine = torch.tensor([dist.distributed_c10d._world.group_count])
        made = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self._group))]
        _all_gather(made, mine, group=self._group)
        least, most = (int(f(torch.cat(made))) for f in (torch.min, torch.max))
        if least != most:
            raise OutOfStep(
                f"some ranks have made {most - least} group{'s' * (most - least > 1)} more than others; the next "
                "group would hang: every rank calls dist.new_group for each group, its members or not",
                hangs=False,
            )

    def _agree(self, group: Any, where: str) -> None:
        work = _barrier(group, async_op=True)
        deadline = _now() + self._agree_seconds
        while not work.is_completed():
            if _now() > deadline:
                raise OutOfStep(
                    f"after the call the ranks no longer meet {where}: some have started a communication that others "
                    "have not",
                    hangs=True,
                )
            _sleep(0.0005)
        work.wait()


def groups_of(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """The groups to hand over, by the name of the input; empty on a rank that stands beside. Made by all ranks."""
    members, world = job["members"], job["world"]
    patience = datetime.timedelta(seconds=job["seconds"] + 10)
    given: dict[str, Any] = {}
    for name, as_axis, parts in job["groups"]:
        for part in parts:
            ranks = [members[place] for place in part]
            alone = as_axis and len(ranks) == 1 and len(parts) > 1  # as the package's axes of one rank: no group
            whole = ranks == list(range(world))
            group = None if alone else dist.group.WORLD if whole else _new_group(ranks, timeout=patience)
            if rank in ranks:
                given[name] = Axis(name, tuple(ranks), ranks.index(rank), group) if as_axis else group
    return given


def strided(value: Any) -> Any:
    """The same values in views that are not contiguous: of a transposed buffer, or of every second number of one."""
    if isinstance(value, list | tuple):
        return type(value)(strided(item) for item in value)
    if isinstance(value, dict):
        return {key: strided(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or value.numel() < 2:
        return value
    if value.ndim > 1:
        view = value.transpose(0, -1).contiguous().transpose(0, -1)
        if not view.is_contiguous():
            return view
    view = value.new_zeros((*value.shape, 2))[..., 0]
    return view.copy_(value)


def digests(inputs: Mapping[str, Any]) -> dict[str, str]:
    """{input: what its values are}, to be compared before and after a call."""
    return {name: _sha256(_dumps(value).encode()).hexdigest() for name, value in inputs.items()}
