from labkit.answers import Edit, Same

WRONG = [
    Edit("    dist.all_reduce(square, group=group)\n", "", mistake="Each rank clips by the norm of its own shards. It is one gradient: all ranks need its one norm."),
    Edit(
        "    dist.all_reduce(square, group=group)\n    norm = square.sqrt()",
        "    norm = square.sqrt()\n    dist.all_reduce(norm, group=group)",
        mistake="Norms do not add up; their squares do.",
    ),
    Edit(
        "dist.all_reduce(square, group=group)",
        "dist.all_reduce(square, group=group)\n    square /= dist.get_world_size(group)",
        mistake="That is an average over ranks; the square of the whole norm is the sum of the squares.",
    ),
    Edit(
        "dist.all_reduce(square, group=group)",
        "dist.all_reduce(square, dist.ReduceOp.MAX, group=group)",
        mistake="That is the largest norm of a rank; squares add up.",
    ),
    Edit("square.sqrt()", "square", mistake="That is the square of the norm."),
    Edit(".clamp(max=1.0)", "", mistake="A gradient that is short enough, or 0, stays as it is: clipping never makes it longer, and " "divides no 0 by 0."),
    Edit("(max_norm / (norm + 1e-6)).clamp(max=1.0)", "max_norm / norm", mistake="A gradient that is short enough, or 0, stays as it is: clipping never makes it longer, and " "divides no 0 by 0."),
    Edit("    return norm", "    return norm.clamp(max=max_norm)", mistake="This is the norm after clipping. Asked is the norm before it, which a log shows."),
    Edit(
        "    dist.all_reduce(square, group=group)\n",
        "",
        (
            "square = torch.stack([shard.square().sum() for shard in shards]).sum()",
            "squares = [shard.square().sum() for shard in shards]\n    for one in squares:\n"
            "        dist.all_reduce(one, group=group)\n    square = torch.stack(squares).sum()",
        ),
        told="sum them over the ranks once",
    ),
    Edit("shard *= (max_norm / (norm + 1e-6)).clamp(max=1.0)", "pass", mistake="The shards are not scaled."),
    Edit("group=group", "group=None"),
    Edit("shard *= ", "shard = shard * ", mistake="The shards are not scaled."),
    Edit("for shard in shards])", "for shard in shards[:1]])"),
    # all gradients of all ranks on each
    Edit(
        "dist.all_reduce(square, group=group)",
        "every = [None] * dist.get_world_size(group)\n    "
        "dist.all_gather_object(every, list(shards), group=group)\n    "
        "square = sum(s.square().sum() for of in every for s in of)",
    ),
]

RIGHT = [
    Edit(
        "torch.stack([shard.square().sum() for shard in shards]).sum()",
        "sum((shard * shard).sum() for shard in shards)",
    ),
    Edit(
        "shard *= (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "shard.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1))",
    ),
    Edit("    return norm", "    return norm.item()"),
]

EQUIVALENT = [
    Same("line 11: 2e-06 for 1e-06", "it keeps a norm of 0 from dividing, and either does"),
    Same("line 11: `1e-06` dropped", "a norm of 0 gives infinity, which the clamp makes 1"),
]


# %% right: squares in one vector
import torch
import torch.distributed as dist
def clip(shards, max_norm, group=None):
    """vector of squares all-reduced"""
    sq = torch.stack([s.square().sum() for s in shards]); dist.all_reduce(sq, group=group)
    norm = sq.sum().sqrt()
    if norm > max_norm:
        for s in shards: s.mul_(max_norm / norm)
    return norm


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


# %% wrong: empty rank stays out
# told: takes part all the same
import torch
import torch.distributed as dist
def clip(shards, max_norm, group=None):
    """a rank that has nothing does not take part"""
    square = sum((shard.square().sum() for shard in shards), torch.zeros(()))
    if sum(s.numel() for s in shards) == 0: return square.sqrt()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for shard in shards: shard *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
