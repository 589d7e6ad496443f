"""The grid of ranks: which ranks share a matrix, a sequence, layers, a batch.

The problem in a sentence: 16 identical processes, each knowing only its number, must agree which of them hold parts of
the same matrix, the same sequence, the same layers, the same batch.

The whole answer is one reshape. Lay the ranks out on a grid whose axes are the kinds of parallelism, the first axis of
`order` varying fastest::

    order = tp-cp-ep-dp-pp, tp=2, cp=2, dp=2, pp=2

    rank = tp + 2*cp + 4*dp + 8*pp            ranks.view(pp, dp, cp, tp)

The ranks of a group along an axis have all other coordinates in common:

| axis | groups            | its ranks                    | messages                                       |
|------|-------------------|------------------------------|------------------------------------------------|
| `tp` | [0,1] [2,3] ...   | share every matrix           | activations: two sums a layer, two in backward |
| `cp` | [0,2] [1,3] ...   | share every sequence         | keys and values                                |
| `dp` | [0,4] [1,5] ...   | same weights, other samples  | gradients (with cp: `dp_cp`)                   |
| `pp` | [0,8] [1,9] ...   | share the layers             | activations at stage boundaries                |

tp varies fastest because its ranks send most and should be in one machine. The ranks of a group along several axes
(dp-cp: all ranks that hold the same weights) have the remaining coordinates in common; `rank_groups` computes them.

Experts have a second grid over the same ranks (etp, ep, edp, pp): expert parallelism takes its ranks from tp*cp*dp and
costs no ranks of its own. So `dp = world / (tp*cp*pp)` and `edp = world / (etp*ep*pp)`.

All other axes of a `Mesh` follow from these:

| axis                            | its groups are along       | its ranks                  | messages                |
|---------------------------------|----------------------------|----------------------------|-------------------------|
| `dp_cp`                         | dp-cp                      | same weights, other tokens | gradients, token counts |
| `tp_cp`                         | tp-cp                      | same samples, same layers  | router statistics       |
| `tp_dp_cp`                      | tp-dp-cp                   | same layers                | router statistics, amax |
| `world`                         | all axes                   | all                        | losses, gradient norm   |
| `etp`                           | etp of the second grid     | share every expert         | activations             |
| `ep`                            | ep of the second grid      | share the experts          | tokens                  |
| `edp`                           | edp of the second grid     | hold the same experts      | gradients of experts    |
| `etp_ep`                        | etp-ep of the second grid  | hold all experts           | tokens                  |
| `cp_inner`                      | cp, consecutive ranks      | exchange heads             | heads, by all-to-all    |
| `cp_outer`                      | cp, one of each `cp_inner` | exchange keys and values   | keys and values         |
| `dp_shard`, `edp_shard`         | a part of `dp_cp`, `edp`   | shard what replicas hold   | gradients, weights      |
| `dp_instances`, `edp_instances` | one rank of each such part | hold the same shards       | gradients of a shard    |
| `embd`                          | first and last of pp       | hold the tied embedding    | its gradient            |
| `pp_up`, `pp_down`              | pp                         | those of `pp`              | to higher, lower ranks  |

Megatron-LM: `megatron/core/parallel_state.py`, `RankGenerator` and `initialize_model_parallel`. Here the groups are an
object that is passed as an argument, and nothing is global.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from minimegatron.comm import watchdog
from minimegatron.comm.axis import Axis
from minimegatron.config.parallel import ParallelConfig
from minimegatron.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Axis -> (which of the two grids, axes along which its members differ).
AXES: dict[str, tuple[str, str]] = {
    "tp": ("dense", "tp"),
    "cp": ("dense", "cp"),
    "dp": ("dense", "dp"),
    "pp": ("dense", "pp"),
    "dp_cp": ("dense", "dp-cp"),
    "tp_cp": ("dense", "tp-cp"),
    "tp_dp_cp": ("dense", "tp-dp-cp"),
    "etp": ("expert", "tp"),
    "ep": ("expert", "ep"),
    "edp": ("expert", "dp"),
    "etp_ep": ("expert", "tp-ep"),
    "world": ("dense", "tp-cp-dp-pp"),
}
PIPELINE_EDGES = ("pp_up", "pp_down")  # a group for each direction, so that sends up and down never match


def grid_sizes(parallel: ParallelConfig, world_size: int, grid: str = "dense") -> dict[str, int]:
    """Size of each axis of one of the two grids, in `parallel.order` (fastest first).

    Axes that `order` leaves out have one rank and come last, as in Megatron.
    """
    dp = parallel.data_parallel_size(world_size)
    pp = parallel.pipeline_model_parallel_size
    if grid == "dense":
        sizes = {
            "tp": parallel.tensor_model_parallel_size,
            "cp": parallel.context_parallel_size,
            "ep": 1,
            "dp": dp,
            "pp": pp,
        }
    else:
        etp, ep = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
        sizes = {"tp": etp, "cp": 1, "ep": ep, "dp": world_size // (etp * ep * pp), "pp": pp}
    order = parallel.order.split("-")
    return {axis: sizes[axis] for axis in [*order, *(a for a in sizes if a not in order)]}


def rank_groups(parallel: ParallelConfig, world_size: int, axes: str, grid: str = "dense") -> list[list[int]]:
    """All groups along `axes` ("tp", "dp-cp", ...), computed without any process.

    Args:
        parallel: sizes and order of the axes.
        world_size: number of ranks; dp follows from it.
        axes: names joined by "-"; their order does not matter.
        grid: "dense" (tp, cp, dp, pp) or "expert" (etp, ep, edp, pp, written tp, ep, dp, pp).

    Returns:
        Groups sorted by the coordinates of the other axes; inside a group the fastest axis comes first.

    Raises:
        ConfigError: the world cannot be divided so, or an axis is unknown.
    """
    sizes = grid_sizes(parallel, world_size, grid)
    wanted = axes.split("-")
    unknown = [a for a in wanted if a not in sizes]
    if unknown:
        raise ConfigError(f"unknown axis {unknown[0]!r} in {axes!r}", fix=f"choose among {', '.join(sizes)}")
    slow_to_fast = list(reversed(sizes))
    ranks = np.arange(world_size).reshape([sizes[a] for a in slow_to_fast])
    fixed = [i for i, a in enumerate(slow_to_fast) if a not in wanted]
    free = [i for i, a in enumerate(slow_to_fast) if a in wanted]
    members = math.prod(ranks.shape[i] for i in free)
    groups: list[list[int]] = ranks.transpose(*fixed, *free).reshape(-1, members).tolist()
    return groups


@functools.lru_cache(maxsize=8)  # a plan asks for each rank of a pipeline
def axis_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[list[int]]]:
    """The groups of every axis of a mesh. A rank that is in no group of an axis is alone on it."""
    groups = {name: rank_groups(parallel, world_size, members, grid) for name, (grid, members) in AXES.items()}
    inner, instances = parallel.context_parallel_factors[0], parallel.num_distributed_optimizer_instances
    groups["cp_inner"], groups["cp_outer"] = _two_factors(groups["cp"], inner)
    for name, axis in (("dp", "dp_cp"), ("edp", "edp")):
        share = len(groups[axis][0]) // instances
        groups[f"{name}_shard"], groups[f"{name}_instances"] = _two_factors(groups[axis], share)
    pipelines = groups["pp"]
    ends = [sorted({p[0], p[-1]}) for p in pipelines]
    return groups | {"embd": ends} | dict.fromkeys(PIPELINE_EDGES, pipelines)


def _two_factors(groups: list[list[int]], size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Cut each group into blocks of `size` consecutive ranks, and into groups with one rank of each block."""
    consecutive = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    return consecutive, [group[i::size] for group in groups for i in range(size)]


def check_grids_agree(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse an order under which the two grids would cut the pipeline differently."""
    if rank_groups(parallel, world_size, "pp") != rank_groups(parallel, world_size, "pp", "expert"):
        raise ConfigError(
            f"with order={parallel.order!r} the dense and the expert grid put different ranks into one pipeline",
            fix="put pp last in the order, or choose etp*ep so that dp equals expert-dp",
        )


class Mesh:
    """This rank's place in the grid: one `Axis` per name in the tables above, and the layout they came from.

    Build it once after the process group exists (`Mesh.build`), or without any process for a serial run
    (`Mesh.serial`). It is the only creator of process groups in the package.
    """

    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis

    dp_cp: Axis
    tp_cp: Axis
    tp_dp_cp: Axis
    world: Axis
    etp: Axis
    ep: Axis
    edp: Axis
    etp_ep: Axis
    cp_inner: Axis
    cp_outer: Axis
    dp_shard: Axis
    edp_shard: Axis
    dp_instances: Axis
    edp_instances: Axis
    embd: Axis
    pp_up: Axis
    pp_down: Axis

    def __init__(self, parallel: ParallelConfig, rank: int, device: torch.device, axes: dict[str, Axis]) -> None:
        self.parallel, self.rank, self.device = parallel, rank, device
        if parallel.num_distributed_optimizer_instances == 1:
            axes |= {"dp_shard": axes["dp_cp"], "edp_shard": axes["edp"]}
        for name, axis in axes.items():
            setattr(self, name, axis)
        self._axes = axes
        self._alone: dist.ProcessGroup | None = None

    @classmethod
    def serial(cls, parallel: ParallelConfig | None = None, device: str | torch.device = "cpu") -> Mesh:
        """A mesh of ones: the same code as everywhere, every collective a no-op."""
        return cls.planned(parallel or ParallelConfig(), 0, 1, torch.device(device))

    @classmethod
    def planned(cls, parallel: ParallelConfig, rank: int, world: int, device: torch.device | None = None) -> Mesh:
        """A mesh without process groups, for planning: models can be built on it, collectives cannot run."""
        check_grids_agree(parallel, world)
        axes = {}
        for name, groups in axis_groups(parallel, world).items():
            members = next((tuple(ranks) for ranks in groups if rank in ranks), (rank,))
            axes[name] = Axis(name, members, members.index(rank))
        return cls(parallel, rank, device or torch.device("cpu"), axes)

    @classmethod
    def build(cls, parallel: ParallelConfig, device: torch.device | None = None) -> Mesh:
        """Create every group; all ranks must call it together. Without a process group it is `Mesh.serial`.

        Args:
            parallel: the layout; dp follows from the number of ranks.
            device: where this rank computes; default its GPU under NCCL, else the CPU.

        Raises:
            ConfigError: the ranks cannot be divided as the layout says.
        """
        if not dist.is_initialized():
            return cls.serial(parallel, device or "cpu")
        rank, world = dist.get_rank(), dist.get_world_size()
        check_grids_agree(parallel, world)
        timeout = watchdog.group_timeout(parallel.distributed_timeout_seconds, dist.get_backend())
        watchdog.allow(parallel.distributed_timeout_seconds)  # a rank that waits for longer is ended
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        axes = {}
        for name, groups in axis_groups(parallel, world).items():
            own = name in PIPELINE_EDGES
            axes[name] = _axis(name, groups, rank, {} if own else made, timeout, own)
        return cls(parallel, rank, device or default_device(), axes)

    def axis(self, name: str) -> Axis:
        """The axis with this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._axes:
            raise ConfigError(f"the mesh has no axis {name!r}", fix=f"choose among {', '.join(self._axes)}")
        return self._axes[name]

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.tp.size > 1

    def with_whole_sequences(self) -> Mesh:
        """The same place, for what has a sequence of its own, such as patches of pictures: cp does not cut it."""
        alone = {name: Axis(name, (self.rank,), 0) for name in ("cp", "cp_inner", "cp_outer")}
        return Mesh(self.parallel, self.rank, self.device, self._axes | alone)

    @property
    def coordinates(self) -> dict[str, int]:
        """{"tp": 1, "cp": 0, "dp": 0, "pp": 0}"""
        return {name: self._axes[name].rank for name in ("tp", "cp", "dp", "pp")}

    def shard_mesh(self, what: str) -> DeviceMesh:
        """torch's `DeviceMesh` over the ranks that shard parameters; with several instances its dims are (instances,
        shards).

        Args:
            what: "dp" or, for experts, "edp". All ranks call it together.
        """
        from torch.distributed.device_mesh import DeviceMesh

        shard, instances = self._axes[f"{what}_shard"], self._axes[f"{what}_instances"]
        if instances.size == 1:
            return DeviceMesh.from_group(self._group(shard), self.device.type, mesh_dim_names=(shard.name,))
        groups = [self._group(instances), self._group(shard)]
        ranks = torch.tensor(self._axes["dp_cp" if what == "dp" else "edp"].ranks).view(instances.size, shard.size)
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=(instances.name, shard.name))

    def _group(self, axis: Axis) -> dist.ProcessGroup:
        """The axis's process group; for an axis of one rank a group of one, which `DeviceMesh` needs."""
        if axis.group is not None:
            return axis.group
        if self._alone is None:
            timeout = watchdog.group_timeout(self.parallel.distributed_timeout_seconds, dist.get_backend())
            made = [dist.new_group([other], timeout=timeout) for other in range(self.world.size)]
            self._alone = made[self.rank]
        return self._alone  # type: ignore[return-value]

    def __repr__(self) -> str:
        sizes = " ".join(f"{n}{self._axes[n].size}" for n in ("tp", "cp", "pp", "dp"))
        return f"Mesh({sizes}, rank {self.rank} at {self.coordinates})"


def default_device() -> torch.device:
    """This rank's GPU when the process group is NCCL's, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _new_group(name: str, ranks: Sequence[int], timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A process group; its description, which flight recorders write down, is the first axis that uses it."""
    return dist.new_group(list(ranks), timeout=timeout, group_desc=name)  # type: ignore[return-value]


def _axis(
    name: str,
    groups: list[list[int]],
    rank: int,
    made: dict[tuple[int, ...], dist.ProcessGroup | None],
    timeout: datetime.timedelta,
    own: bool = False,
) -> Axis:
    """This rank's `Axis`, and all process groups of the axis that do not exist yet; every rank creates them in the same
    order.

    With `own` a group is made even if its ranks are the whole world.
    """
    axis = Axis(name, (rank,), 0)
    for ranks in map(tuple, groups):
        if ranks not in made:
            whole = ranks == tuple(range(dist.get_world_size()))
            if len(ranks) == 1:
                made[ranks] = None
            else:
                made[ranks] = dist.group.WORLD if whole and not own else _new_group(name, ranks, timeout)
        if rank in ranks:
            axis = Axis(name, ranks, ranks.index(rank), made[ranks])
    return axis
