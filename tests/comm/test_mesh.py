"""The grid of ranks. Equality with Megatron-Core's rank generator is in tests/golden."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.comm.mesh import AXES, Mesh, check_grids_agree, rank_groups
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError

SIXTEEN = ParallelConfig(
    tensor_model_parallel_size=2,
    context_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=1,
)


sizes = st.sampled_from([1, 2, 3, 4])


@given(tp=sizes, cp=sizes, pp=sizes, dp=sizes, order=st.permutations(["tp", "cp", "ep", "dp", "pp"]))
def test_groups_partition_the_world(tp, cp, pp, dp, order):
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp, order="-".join(order)
    )
    world = tp * cp * pp * dp
    for axes, size in {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "dp-cp": dp * cp, "tp-pp": tp * pp}.items():
        groups = rank_groups(parallel, world, axes)
        assert sorted(r for g in groups for r in g) == list(range(world))
        assert {len(g) for g in groups} == {size}
    # Two groups along complementary axes share exactly one rank.
    for a in rank_groups(parallel, world, "tp-cp"):
        for b in rank_groups(parallel, world, "dp-pp"):
            assert len(set(a) & set(b)) == 1


def test_an_unknown_axis_and_a_world_that_does_not_divide():
    with pytest.raises(ConfigError, match="unknown axis 'xp'"):
        rank_groups(ParallelConfig(), 4, "tp-xp")
    with pytest.raises(ConfigError, match="6 ranks cannot be divided"):
        rank_groups(ParallelConfig(tensor_model_parallel_size=4), 6, "tp")
    with pytest.raises(ConfigError, match="expert groups"):
        rank_groups(ParallelConfig(expert_model_parallel_size=3), 4, "tp")


def test_an_order_that_cuts_pipelines_differently_is_refused():
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": 2}
    bad = ParallelConfig(order="tp-cp-pp-ep-dp", **sizes)
    with pytest.raises(ConfigError, match="different ranks into one pipeline"):
        check_grids_agree(bad, 8)


def test_serial_mesh_has_every_axis_and_no_group():
    mesh = Mesh.serial()
    for name in [*AXES, "embd"]:
        axis = mesh.axis(name)
        assert (axis.size, axis.rank, axis.group) == (1, 0, None)
    with pytest.raises(ConfigError, match="no axis"):
        mesh.axis("zp")


def what_the_mesh_says(rank: int, world: int) -> dict:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    names = [*AXES, "embd"]
    groups = {n: mesh.axis(n).group for n in names}
    return {
        "ranks": {n: mesh.axis(n).ranks for n in names},
        "torch": {n: None if g is None else tuple(dist.get_process_group_ranks(g)) for n, g in groups.items()},
        "me": {n: mesh.axis(n).ranks[mesh.axis(n).rank] for n in names},
        "shared": mesh.tp.group is mesh.etp.group,
    }


def test_built_groups_are_the_computed_ones(ranks):
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for rank, says in enumerate(ranks(8).run(what_the_mesh_says)):
        for name, (grid, axes) in AXES.items():
            expected = next(g for g in rank_groups(parallel, 8, axes, grid) if rank in g)
            assert says["ranks"][name] == tuple(expected)
            assert says["torch"][name] == (None if len(expected) == 1 else tuple(expected))
        assert set(says["me"].values()) == {rank}
        assert says["ranks"]["embd"] == says["ranks"]["pp"]
        assert says["shared"], "equal groups are created once"


GROUP_OF_RANK_0 = {
    "tp": [0, 1], "cp": [0, 2], "dp": [0, 4], "pp": [0, 8], "dp_cp": [0, 2, 4, 6], "tp_cp": [0, 1, 2, 3],
    "tp_dp_cp": [0, 1, 2, 3, 4, 5, 6, 7], "etp": [0], "ep": [0, 1, 2, 3], "edp": [0, 4], "etp_ep": [0, 1, 2, 3],
    "world": list(range(16)),
}  # fmt: skip


def test_every_axis_of_the_mesh_is_what_its_name_says():
    groups = {name: rank_groups(SIXTEEN, 16, axes, grid)[0] for name, (grid, axes) in AXES.items()}
    assert groups == GROUP_OF_RANK_0


def ends_and_timeouts(rank: int, world: int) -> tuple:
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=4, distributed_timeout_seconds=17.0))
    groups = [mesh.axis(name).group for name in ("embd", "pp_up", "pp_down")]
    limits = {g._get_backend(mesh.device).options._timeout.total_seconds() for g in groups if g is not None}
    return mesh.embd.ranks, mesh.embd.rank, limits


def test_the_ends_of_a_pipeline_share_the_embedding_and_every_group_has_its_deadline(ranks):
    says = ranks(4).run(ends_and_timeouts)
    assert [(members, place) for members, place, _ in says] == [((0, 3), 0), ((1,), 0), ((2,), 0), ((0, 3), 1)]
    assert all(limits == {17.0} for *_, limits in says)
