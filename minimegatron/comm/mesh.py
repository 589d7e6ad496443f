"""Ranks and their coordinates: who shares what with whom.

The problem in a sentence: 16 identical processes, each knowing only its number, must agree which of them hold parts of
the same matrix, the same sequence, the same layers, the same batch.

The whole answer is one reshape. Lay the ranks out on a grid whose axes are the kinds of parallelism, the first axis of
`order` varying fastest::

    order = tp-cp-ep-dp-pp, tp=2, cp=2, dp=2, pp=2

    rank = tp + 2*cp + 4*dp + 8*pp            ranks.view(pp, dp, cp, tp)

A group along an axis is what remains when every other coordinate is fixed: tp = [0,1] [2,3] ..., cp = [0,2] [1,3] ...,
dp = [0,4] [1,5] ..., pp = [0,8] [1,9] ... A group along several axes (dp-cp: all ranks that hold the same weights) is
what remains when the others are fixed. tp varies fastest because its ranks talk most and should sit in one machine.

Experts see the same ranks on a second grid (etp, ep, edp, pp): expert parallelism takes its ranks from tp*cp*dp and
costs no ranks of its own. So `dp = world / (tp*cp*pp)` and `edp = world / (etp*ep*pp)`.

| axis       | who is in it                                     | what travels on it                              |
|------------|--------------------------------------------------|-------------------------------------------------|
| `tp`       | share every matrix                               | activations, twice a layer and direction        |
| `cp`       | share every sequence                             | keys and values                                 |
| `cp_inner`, `cp_outer` | the two factors of cp: neighbours; one of each neighbourhood | heads; keys and values  |
| `dp`       | same weights, other samples                      | (see dp_cp)                                     |
| `pp`       | share the layers                                 | activations at stage boundaries                 |
| `dp_cp`    | same weights, other tokens                       | gradients, token counts                         |
| `dp_shard`, `edp_shard` | of dp_cp, of edp: share out what replicas hold  | shards of gradients and of weights |
| `dp_instances`, `edp_instances` | of dp_cp, of edp: hold the same shards  | gradients of a shard               |
| `tp_cp`    | same samples, same layers                        | router statistics                               |
| `tp_dp_cp` | same layers                                      | fp8 amax, router statistics                     |
| `mp`       | together hold one copy of the model (tp-pp)      | the gradient norm                               |
| `ep`       | share the experts                                | tokens                                          |
| `etp`      | share every expert                               | activations                                     |
| `edp`      | hold the same experts                            | expert gradients                                |
| `etp_ep`, `etp_ep_pp` | hold all experts of a layer; of the model | tokens; the gradient norm                    |
| `embd`     | first and last stage: hold the tied embedding    | its gradient                                    |
| `pp_up`, `pp_down` | those of `pp`, in groups of their own: messages to higher, to lower ranks (`comm/p2p`) ||
| `world`    | all ranks                                        | decisions                                       |

Megatron-LM: `megatron/core/parallel_state.py`, `RankGenerator` and `initialize_model_parallel`. Here the groups are an
object that is passed to what needs it, and nothing is global.
"""

from __future__ import annotations

import datetime
import math
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

# Attribute of Mesh -> (which of the two grids, axes along which its members differ).
AXES: dict[str, tuple[str, str]] = {
    "tp": ("dense", "tp"),
    "cp": ("dense", "cp"),
    "dp": ("dense", "dp"),
    "pp": ("dense", "pp"),
    "dp_cp": ("dense", "dp-cp"),
    "tp_cp": ("dense", "tp-cp"),
    "tp_dp_cp": ("dense", "tp-dp-cp"),
    "mp": ("dense", "tp-pp"),
    "etp": ("expert", "tp"),
    "ep": ("expert", "ep"),
    "edp": ("expert", "dp"),
    "etp_ep": ("expert", "tp-ep"),
    "etp_ep_pp": ("expert", "tp-ep-pp"),
    "world": ("dense", "tp-cp-dp-pp"),
}


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
        grid: "dense" (tp, cp, dp, pp) or "expert" (tp means etp; ep, dp means edp, pp).

    Returns:
        Groups in the order of their first member's fixed coordinates; ranks inside a group with the fastest axis first.

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
    return [[int(r) for r in group] for group in ranks.transpose(*fixed, *free).reshape(-1, members)]


def context_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[list[int]]]:
    """Groups of the two factors of cp: consecutive ranks of a cp group, and one rank of each such neighbourhood."""
    inner, outer = parallel.context_parallel_factors
    groups = rank_groups(parallel, world_size, "cp")
    return {
        "cp_inner": [group[i * inner : (i + 1) * inner] for group in groups for i in range(outer)],
        "cp_outer": [group[i::inner] for group in groups for i in range(inner)],
    }


def instance_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[list[int]]]:
    """Groups of the two factors of dp_cp, and of edp: consecutive ranks of a group, and one of each of these."""
    found, instances = {}, parallel.num_distributed_optimizer_instances
    for name, axes, grid in (("dp", "dp-cp", "dense"), ("edp", "dp", "expert")):
        groups = rank_groups(parallel, world_size, axes, grid)
        share = len(groups[0]) // instances
        found[f"{name}_shard"] = [group[i * share : (i + 1) * share] for group in groups for i in range(instances)]
        found[f"{name}_instances"] = [group[i::share] for group in groups for i in range(share)]
    return found


def check_grids_agree(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse an order under which the two grids would cut the pipeline differently."""
    if rank_groups(parallel, world_size, "pp") != rank_groups(parallel, world_size, "pp", "expert"):
        raise ConfigError(
            f"with order={parallel.order!r} the dense and the expert grid put different ranks into one pipeline",
            fix="put pp last in the order, or choose etp*ep so that dp equals expert-dp",
        )


class Mesh:
    """This rank's place in the grid: one `Axis` per name in the table above, and the layout they came from.

    Build it once after the process group exists (`Mesh.build`), or without any process for a serial run
    (`Mesh.serial`). It is the only creator of process groups in the package.
    """

    tp: Axis
    cp: Axis
    cp_inner: Axis
    cp_outer: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    dp_shard: Axis
    dp_instances: Axis
    edp_shard: Axis
    edp_instances: Axis
    tp_cp: Axis
    tp_dp_cp: Axis
    mp: Axis
    etp: Axis
    ep: Axis
    edp: Axis
    etp_ep: Axis
    etp_ep_pp: Axis
    embd: Axis
    pp_up: Axis
    pp_down: Axis
    world: Axis

    def __init__(self, parallel: ParallelConfig, rank: int, device: torch.device, axes: dict[str, Axis]) -> None:
        self.parallel = parallel
        self.rank = rank
        self.device = device
        for name, axis in axes.items():
            setattr(self, name, axis)
        self._axes = axes
        self._device_mesh: DeviceMesh | None = None
        self._alone: dist.ProcessGroup | None = None

    @classmethod
    def serial(cls, parallel: ParallelConfig | None = None, device: str | torch.device = "cpu") -> Mesh:
        """A mesh of ones: the same code as everywhere, every collective a no-op."""
        parallel = parallel or ParallelConfig()
        parallel.data_parallel_size(1)
        others = (*context_groups(parallel, 1), *instance_groups(parallel, 1), "embd", "pp_up", "pp_down")
        axes = {name: Axis(name, (0,), 0) for name in [*AXES, *others]}
        return cls(parallel, 0, torch.device(device), axes)

    @classmethod
    def planned(cls, parallel: ParallelConfig, rank: int, world: int) -> Mesh:
        """The mesh of one rank of a world that need not exist: a model can be built on it, and nothing can travel."""
        check_grids_agree(parallel, world)
        groups = {name: rank_groups(parallel, world, members, grid) for name, (grid, members) in AXES.items()}
        groups |= context_groups(parallel, world) | instance_groups(parallel, world)
        pipelines = rank_groups(parallel, world, "pp")
        groups |= {"embd": [sorted({p[0], p[-1]}) for p in pipelines], "pp_up": pipelines, "pp_down": pipelines}
        axes = {}
        for name, of in groups.items():
            mine = next((tuple(ranks) for ranks in of if rank in ranks), (rank,))
            axes[name] = Axis(name, mine, mine.index(rank))
        if parallel.num_distributed_optimizer_instances == 1:
            axes |= {"dp_shard": axes["dp_cp"], "edp_shard": axes["edp"]}
        return cls(parallel, rank, torch.device("cpu"), axes)

    @classmethod
    def build(cls, parallel: ParallelConfig, device: torch.device | None = None) -> Mesh:
        """Create every group; all ranks must call it together.

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
        watchdog.allow(parallel.distributed_timeout_seconds)
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        axes = {}
        for name, (grid, members) in AXES.items():
            axes[name] = _axis(name, rank_groups(parallel, world, members, grid), rank, made, timeout)
        for name, groups in (context_groups(parallel, world) | instance_groups(parallel, world)).items():
            axes[name] = _axis(name, groups, rank, made, timeout)
        if parallel.num_distributed_optimizer_instances == 1:
            axes |= {"dp_shard": axes["dp_cp"], "edp_shard": axes["edp"]}
        pipelines = rank_groups(parallel, world, "pp")
        ends = [sorted({p[0], p[-1]}) for p in pipelines]
        inside = any(rank in pair for pair in ends)
        embd = _axis("embd", ends, rank, made, timeout)
        axes["embd"] = embd if inside else Axis("embd", (rank,), 0)
        for name in ("pp_up", "pp_down"):  # one sender and one receiver on each edge, so that no two messages cross
            axes[name] = _axis(name, pipelines, rank, {}, timeout, own=True)
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

    @property
    def coordinates(self) -> dict[str, int]:
        """{"tp": 1, "cp": 0, "dp": 0, "pp": 0}"""
        return {name: self._axes[name].rank for name in ("tp", "cp", "dp", "pp")}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same groups as torch's `DeviceMesh` with axes (pp, dp, cp, tp), for FSDP2, DTensor and checkpoints."""
        from torch.distributed.device_mesh import DeviceMesh

        if self._device_mesh is None:
            sizes = grid_sizes(self.parallel, self.world.size)
            names = [a for a in reversed(sizes) if a != "ep"]
            ranks = torch.arange(self.world.size).view([sizes[a] for a in names])
            self._device_mesh = DeviceMesh.from_group(
                [self._group(self._axes[n]) for n in names],
                self.device.type,
                mesh=ranks,
                mesh_dim_names=tuple(names),
            )
        return self._device_mesh

    def shard_mesh(self, what: str) -> DeviceMesh:
        """Ranks that share parameters out as torch's `DeviceMesh` (shards), or (instances, shards) where there are.

        Args:
            what: "dp" or, of experts, "edp". All ranks call it together.
        """
        from torch.distributed.device_mesh import DeviceMesh

        shard, instances = self._axes[f"{what}_shard"], self._axes[f"{what}_instances"]
        if instances.size == 1:
            return DeviceMesh.from_group(self._group(shard), self.device.type, mesh_dim_names=(shard.name,))
        groups = [self._group(instances), self._group(shard)]
        ranks = torch.tensor(self._axes["dp_cp" if what == "dp" else "edp"].ranks).view(instances.size, shard.size)
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=(instances.name, shard.name))

    def _group(self, axis: Axis) -> dist.ProcessGroup:
        """The axis's group; for one rank alone a real one too, because `DeviceMesh` wants it."""
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


def _axis(
    name: str,
    groups: list[list[int]],
    rank: int,
    made: dict[tuple[int, ...], dist.ProcessGroup | None],
    timeout: datetime.timedelta,
    own: bool = False,
) -> Axis:
    """Create the groups that do not exist yet (every rank creates all of them, in the same order) and find ours.

    With `own` a group is made even where the ranks are the whole world.
    """
    mine = Axis(name, (rank,), 0)
    for ranks in map(tuple, groups):
        if ranks not in made:
            whole = ranks == tuple(range(dist.get_world_size()))
            if len(ranks) == 1:
                made[ranks] = None
            else:
                made[ranks] = dist.group.WORLD if whole and not own else dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            mine = Axis(name, ranks, ranks.index(rank), made[ranks])
    return mine
