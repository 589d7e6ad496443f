from labkit.answers import Edit, Same

_SUM = "    dist.all_reduce(square, group=group)\n"
_FACTOR = "(max_norm / (norm + 1e-6)).clamp(max=1.0)"
_SQUARES = "torch.stack([shard.square().sum() for shard in shards]).sum()"
_SHORT = "A gradient that is short enough, or 0, stays as it is: clipping never makes it longer, and divides no 0 by 0."

WRONG = [
    Edit(f"shard *= {_FACTOR}", "pass", mistake="The shards are not scaled."),
    Edit("shard *= ", "shard = shard * ", mistake="The shards are not scaled."),
    Edit(_SUM, "", mistake="Each rank clips by the norm of its own shards. It is one gradient: all ranks need its one norm."),
    Edit("shard.square().sum() for", "shard.norm() for", ("square.sqrt()", "square"), mistake="Norms do not add up; their squares do."),
    Edit(f"{_SUM}    norm = square.sqrt()\n", f"    norm = square.sqrt()\n{_SUM.replace('square', 'norm')}", mistake="Norms do not add up; their squares do."),
    Edit(_SUM, f"{_SUM}    square /= dist.get_world_size(group)\n", mistake="That is an average over ranks; the square of the whole norm is the sum of the squares."),
    Edit("(square, group", "(square, dist.ReduceOp.MAX, group", mistake="That is the largest norm of a rank; squares add up."),
    Edit("square.sqrt()", "square", mistake="That is the square of the norm."),
    Edit("    return norm", "    return norm.clamp(max=max_norm)", mistake="This is the norm after clipping. Asked is the norm before it, which a log shows."),
    Edit(".clamp(max=1.0)", "", mistake=_SHORT),
    Edit(_FACTOR, "max_norm / norm", mistake=_SHORT),
    Edit(_SUM, f"    if not square.any():\n        return square.sqrt()\n{_SUM}", told="takes part all the same"),
    Edit(
        _SQUARES, "[shard.square().sum() for shard in shards]",
        (_SUM, "    for one in square:\n        dist.all_reduce(one, group=group)\n    square = torch.stack(square).sum()\n"),
        told="sum them over the ranks once",
    ),
    Edit("group=group", "group=None"),
    Edit("for shard in shards])", "for shard in shards[:1]])"),
    # all gradients of all ranks on each
    Edit(
        _SUM,
        "    every = [None] * dist.get_world_size(group)\n    dist.all_gather_object(every, list(shards), group=group)\n"
        "    square = sum(s.square().sum() for of in every for s in of)\n",
    ),
]

RIGHT = [
    Edit(_SQUARES, "sum((shard * shard).sum() for shard in shards)"),
    Edit("]).sum()", "])", ("square.sqrt()", "square.sum().sqrt()")),
    Edit(f"shard *= {_FACTOR}", "shard.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1))", ("    return norm", "    return norm.item()")),
]

EQUIVALENT = [
    Same("line 11: 2e-06 for 1e-06", "it keeps a norm of 0 from dividing, and either does"),
    Same("line 11: `1e-06` dropped", "a norm of 0 gives infinity, which the clamp makes 1"),
]


# %% right: torch.distributed.nn, norms in float64
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import math
def clip(shards, max_norm, group=None):
    """torch.distributed.nn; hypot of per-tensor norms"""
    sq = torch.tensor([sum(float(s.double().pow(2).sum()) for s in shards)], dtype=torch.float64)
    total = dfn.all_reduce(sq, group=group or dist.group.WORLD)
    norm = math.sqrt(total.item())
    torch._foreach_mul_(shards, min(1.0, max_norm / (norm + 1e-12))) if shards else None
    return torch.tensor(norm)
