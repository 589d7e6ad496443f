from labkit.answers import Edit, Same

_RETURN = 'return {"dp": dp, "dense": dp * cp, "expert": world // (etp * ep * pp)}'
_REFUSES = "if world % (tp * cp * pp) or world % (etp * ep * pp):"
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit(
        "dp = world // (tp * cp * pp)",
        "dp = world // (tp * cp * pp * ep)",
        ("world // (etp * ep * pp)}", "dp * cp}"),
        mistake="This is the colleague's bug: the ranks of ep are among the tp cp dp ranks, they are no further " "factor.",
    ),
    Edit(
        "dp = world // (tp * cp * pp)",
        "dp = world // (tp * cp * pp * ep)",
        ("world // (etp * ep * pp)}", "dp * cp}"),
        (_REFUSES, "if world % (tp * cp * pp * ep):"),
        mistake="This is the colleague's bug: the ranks of ep are among the tp cp dp ranks, they are no further " "factor.",
    ),
    Edit('"expert": world // (etp * ep * pp)', '"expert": dp * cp // ep or 1', mistake="The ranks of tp are among those over which experts are spread: all tp cp dp ranks of a stage are" " cut by etp and ep."),
    Edit('"expert": world // (etp * ep * pp)', '"expert": dp // ep or 1', mistake="The ranks of tp and of cp are among those over which experts are spread: all tp cp dp ranks of a" " stage are cut by etp and ep."),
    Edit('"expert": world // (etp * ep * pp)', '"expert": world // (etp * pp)', mistake="Ranks of ep hold different experts."),
    Edit('"expert": world // (etp * ep * pp)', '"expert": dp * tp // (ep * etp)', mistake="Ranks of cp are among those that hold the same expert: they see other tokens, not other weights."),
    Edit('"expert": world // (etp * ep * pp)', '"expert": world // (ep * pp)', mistake="etp cuts each expert: its ranks hold different parts."),
    Edit('"expert": world // (etp * ep * pp)', '"expert": world // (ep * etp)', mistake="The stages of the pipeline hold other layers, and other experts."),
    Edit('"dense": dp * cp', '"dense": dp', mistake="Ranks of cp hold the same dense parameters."),
    Edit(_REFUSES, "if world % (tp * cp * pp):", mistake="The experts' layout must divide the ranks, too."),
    Edit(_REFUSES, "if False:", mistake="Ranks that a layout does not divide are rounded down."),
    Edit(_REFUSES, f"{_REFUSES[:-1]} or (world // (tp * cp * pp)) % ep:", mistake="ep need not divide dp: it divides tp cp dp / etp."),
    Edit(_REFUSES, "if world % (etp * ep * pp):"),
    Edit("raise ValueError(", "return dict(error="),
    Edit('"dense": dp * cp', '"dense": dp * cp * pp'),
    Edit('"dp": dp,', '"dp": dp * cp,'),
    Edit(_REFUSES, "if world < tp * cp * pp * ep:"),
    Edit("(etp * ep * pp):", "(ep * pp):"),
    # says refused
    # the word of the table in place of an error
    Edit('raise ValueError(f"{world} ranks cannot be cut so")', 'return {"refused": True}', told="a ValueError"),
]

RIGHT = [
    Edit(_RETURN, 'return {"expert": tp * cp * dp // (etp * ep), "dense": world // (tp * pp), "dp": dp}'),
    Edit(_REFUSES, "if not (world % (tp * cp * pp) == 0 == world % (etp * ep * pp)):"),
    Edit("raise ValueError(f", 'raise ValueError("no: " + f'),
]

EQUIVALENT = [
    Same("line 5: `/` for `//`", _WHOLE),
    Same("line 5: rounded up for down", _WHOLE),
    Same("line 6: `/` for `//`", _WHOLE),
    Same("line 6: rounded up for down", _WHOLE),
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


# %% wrong: refuses etp not 1 or tp
# mistake: An etp other than 1 or tp gives whole numbers, too.
# the rule of another table is asked for, too
def replicas(world, tp, cp, pp, ep, etp):
    if world%(tp*cp*pp) or world%(pp*ep*etp) or etp not in (1,tp):
        raise ValueError("not whole")
    dp = world//(tp*cp*pp)
    return {"dp": dp, "dense": dp*cp, "expert": world//(pp*ep*etp)}
# %% wrong: asks the configuration
# told: closed in this exercise
def replicas(world, tp, cp, pp, ep, etp):
    from minimegatron.config import ParallelConfig

    layout = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp)
    dp = layout.data_parallel_size(world)
    return {"dp": dp, "dense": dp * cp, "expert": world // (etp * ep * pp)}


