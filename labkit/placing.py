"""The learner's side of a trial's setting: groups, and tensors that are not contiguous.

A collective that one rank has started and another has not, or a group that only its members have made, leaves the
ranks out of step, and hangs the *next* program. The broker sees both (`transport.Transport.evidence`).
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit import plain
from minimegatron.comm.axis import Axis

_dumps, _sha256 = plain.dumps, hashlib.sha256


def groups_of(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """The groups for the function, by the name of the input; {} on a rank that only stands beside. Made by all
    ranks."""
    members, world = job["members"], job["world"]
    patience = datetime.timedelta(seconds=job["seconds"] + 10)
    given: dict[str, Any] = {}
    for name, as_axis, parts in job["groups"]:
        for part in parts:
            ranks = [members[place] for place in part]
            alone = as_axis and len(ranks) == 1 and len(parts) > 1  # as the package's axes of one rank: no group
            whole = ranks == list(range(world))
            group = None if alone else dist.group.WORLD if whole else dist.new_group(ranks, timeout=patience)
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
    """{input: digest of its values}, to be compared before and after a call."""
    return {name: _sha256(_dumps(value).encode()).hexdigest() for name, value in inputs.items()}
