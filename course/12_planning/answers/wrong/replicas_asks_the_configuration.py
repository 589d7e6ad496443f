# told: closed in this exercise
def replicas(world, tp, cp, pp, ep, etp):
    from minimegatron.config import ParallelConfig

    layout = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp)
    dp = layout.data_parallel_size(world)
    return {"dp": dp, "dense": dp * cp, "expert": world // (etp * ep * pp)}
