"""An `Axis` is a group of ranks for one kind of parallelism; every collective and every layer that is cut takes one."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Axis:
    """A group of ranks: those that differ from this one only along one axis (or a set of axes) of the grid
    (`comm/mesh`).

    Attributes:
        name: `tp`, `dp_cp`, ...
        ranks: global ranks in order of their coordinate; this rank is `ranks[rank]`.
        rank: this rank's position in `ranks`.
        group: torch's process group; None for one rank, and on a planned mesh, where nothing can be sent.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def world(cls, name: str) -> Axis:
        """All ranks of torch's default process group, for code without a mesh."""
        return cls(name, tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


ALONE = Axis("", (0,), 0)  # an axis of one rank, over which collectives do nothing
