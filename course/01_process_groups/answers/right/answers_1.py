# a list made by the package's mesh
from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    layout = ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
    )
    group = next(g for g in rank_groups(layout, world, "dp-cp") if 0 in g)
    experts = rank_groups(layout, world, "dp", grid="expert")[0]
    return {
        "dp": len(rank_groups(layout, world, "dp")[0]), "edp": len(experts), "same_weights_as_rank_0": group[:4],
        "all_reduce_seconds": 2 * gigabytes * (len(group) - 1) / len(group) / gb_per_second,
    }
