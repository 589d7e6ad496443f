from labkit.answers import Edit, Same

_EXPERT = '"expert": world // (etp * ep * pp)'
_REFUSES = "if world % (tp * cp * pp) or world % (etp * ep * pp):"

WRONG = [
    Edit("dp = world // (tp * cp * pp)", "dp = world // (tp * cp * pp * ep)", (_EXPERT, '"expert": dp * cp'), mistake="This is the colleague's bug: the ranks of ep are among the tp cp dp ranks, they are no further factor."),
    Edit("dp = world // (tp * cp * pp)", "dp = world // (tp * cp * pp * ep)", mistake="This is the colleague's bug: the ranks of ep are among the tp cp dp ranks, they are no further factor."),
    Edit(_EXPERT, '"expert": dp // ep or 1', mistake="The ranks of tp and cp are among those over which experts are spread: all tp cp dp ranks of a stage are cut by etp and ep."),
    Edit(_EXPERT, '"expert": dp * cp // ep or 1', mistake="The ranks of tp are among those over which experts are spread: all tp cp dp ranks of a stage are cut by etp and ep."),
    Edit(_EXPERT, '"expert": dp * tp // (ep * etp)', mistake="Ranks of cp are among those that hold the same expert: they see other tokens, not other weights."),
    Edit(_EXPERT, '"expert": world // (etp * pp)', mistake="Ranks of ep hold different experts."),
    Edit(_EXPERT, '"expert": world // (ep * pp)', mistake="etp cuts each expert: its ranks hold different parts."),
    Edit(_EXPERT, '"expert": world // (ep * etp)', mistake="The stages of the pipeline hold other layers, and other experts."),
    Edit('"dense": dp * cp', '"dense": dp', mistake="Ranks of cp hold the same dense parameters."),
    Edit('"dense": dp * cp', '"dense": world // pp', mistake="Ranks of tp hold different parts of a dense matrix."),
    Edit(_REFUSES, "if world % (tp * cp * pp):", mistake="The experts' layout must divide the ranks, too."),
    Edit(_REFUSES, f"{_REFUSES[:-1]} or (world // (tp * cp * pp)) % ep:", mistake="ep need not divide dp: it divides tp cp dp / etp."),
    Edit(_REFUSES, "if False:", told="a ValueError"),
    Edit(_REFUSES, "if world % (etp * ep * pp):"),
    Edit(_REFUSES, f"{_REFUSES[:-1]} or etp not in (1, tp):"),
    Edit('"dense": dp * cp', '"dense": dp * cp * pp'),
    Edit('raise ValueError(f"{world} ranks cannot be cut so")', 'return {"refused": True}', told="a ValueError"),
]

RIGHT = [
    Edit('"dense": dp * cp, ' + _EXPERT, '"expert": tp * cp * dp // (etp * ep), "dense": world // (tp * pp)'),
    Edit(_REFUSES, "if not (world % (tp * cp * pp) == 0 == world % (etp * ep * pp)):"),
]

EQUIVALENT = [
    Same(f"line {number}: {how}", "every division here divides evenly")
    for number in (5, 6) for how in ("`/` for `//`", "rounded up for down")
]


# %% right: ranks are numbered and grouped by what they hold
from collections import Counter


def replicas(world, tp, cp, pp, ep, etp):
    stage, rest = divmod(world, pp)
    if rest or stage % (tp * cp) or stage % (etp * ep):
        raise ValueError("the layout does not divide the ranks")
    dense = Counter((rank // stage, rank % tp) for rank in range(world))
    expert = Counter((rank // stage, rank % etp, rank // etp % ep) for rank in range(world))
    return {"dp": dense[0, 0] // cp, "dense": dense[0, 0], "expert": expert[0, 0, 0]}


# %% right: dp as a float
def replicas(world, tp, cp, pp, ep, etp):
    if world%(tp*cp*pp) or world%(pp*ep*etp):
        raise ValueError("not whole")
    dp = world/(tp*cp*pp)
    return {"dp": dp, "dense": dp*cp, "expert": world//(pp*ep*etp)}


# %% wrong: asks the configuration
# told: closed in this exercise
def replicas(world, tp, cp, pp, ep, etp):
    from minimegatron.config import ParallelConfig

    layout = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp)
    dp = layout.data_parallel_size(world)
    return {"dp": dp, "dense": dp * cp, "expert": world // (etp * ep * pp)}
