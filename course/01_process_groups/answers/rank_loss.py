from labkit.answers import Edit

_OWN = "You divide by this rank's own count. The batch is spread over all ranks."
_MEANS = "This is the mean of the ranks' means. All tokens should weigh the same, and here all ranks do."
_GROUP = "The ranks in `group` take part in each all-reduce, all of them and no others."
_SUM, _COUNT = "(losses * mask).sum()", "    dist.all_reduce(count, group=group)\n"
_SHARE = _SUM + " / count.clamp(min=1.0)"

WRONG = [
    Edit("count.clamp(min=1.0)", "count",
         mistake="That is 0 / 0. The loss is 0 where no rank of the group counts a token."),
    Edit("= mask.sum()", "= mask.sum().clamp(min=1.0)",
         mistake="Your divisor is too large where a rank has no counted token: a rank without any adds 0 to the "
                 "count."),
    Edit("    return", "    if not mask.any():\n        return torch.zeros(())\n    return",
         mistake="On a rank without a counted token your loss has no gradient, so backward() fails there. Its gradient "
                 "is 0."),
    Edit(_SHARE, _SUM, mistake="This is a sum, and nothing divides it. Asked is a share of a mean."),
    Edit(_SHARE, f"torch.tensor(({_SHARE}).item())",
         mistake="Your loss has no gradient: .item(), float() or detach() cuts it off from `losses`."),
    Edit(_COUNT, "", mistake=_OWN),
    Edit(_SHARE, _SUM + " / mask.sum()", mistake=_OWN),
    Edit(_SHARE, _SUM + " / mask.sum().clamp(min=1.0) / dist.get_world_size(group)", mistake=_MEANS),
    Edit(_SHARE, _SUM + " / mask.sum() / dist.get_world_size(group)", mistake=_MEANS),
    Edit("count, group=group", "count", mistake=_GROUP),
    Edit(_SHARE, _SHARE + " / dist.get_world_size(group)",
         mistake="You divide by the number of ranks as well. The gradients are summed over ranks, not averaged."),
    Edit(_SUM, _SUM + " * dist.get_world_size(group)",
         mistake="Your share is too large by the number of ranks. The gradients are summed over ranks, not averaged."),
    Edit("count.clamp", "(count / dist.get_world_size(group)).clamp",
         mistake="Your share is too large by the number of ranks. The gradients are summed over ranks, not averaged."),
    Edit(_SUM, "losses.sum()", mistake="The losses where the mask is 0 are in your sum."),
    Edit("= mask.sum()", "= (mask + 1).sign().sum()",
         mistake="You count all tokens, and only those with a 1 in the mask count."),
    Edit(
        "count = mask.sum()", "count = torch.tensor(float(len(mask)))", (_SUM,
        "((losses * mask).sum(1) / mask.sum(1).clamp(min=1.0)).sum()"),
        mistake="You take the mean of the sequences' means. All tokens should weigh the same, and here all sequences "
                "do.",
    ),
    Edit("return " + _SHARE, f"loss = {_SHARE}\n    dist.all_reduce(loss, group=group)\n    return loss",
         mistake="Your loss is the mean over all ranks already. Asked is this rank's share, which the caller sums."),
    Edit(_COUNT, "    if count == 0:\n        return losses.sum() * 0\n" + _COUNT,
         told="Every rank of the group takes part"),
    # right where all ranks have as many places
    Edit("mask.sum()", "mask.mean()", (_SUM, "(losses * mask).mean()"), ("min=1.0", "min=1e-6"), told="hidden"),
    Edit("count.clamp(min=1.0)", "(count + 1.0)", told="rank 0: loss"),
    Edit("min=1.0", "min=2.0", told="a single counted token | hidden"),
    Edit("return " + _SHARE, "mask /= count.clamp(min=1.0)\n    return (losses * mask).sum()",
         told="it changes its input `mask`"),
    Edit(_COUNT, "    count = count / dist.get_world_size(group)\n" + _COUNT, ("count.clamp",
         "(count * dist.get_world_size()).clamp"),
         told="hidden"),
]


# %% right: the counts as a vector with one entry a rank; a dot product
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    n = torch.zeros(dist.get_world_size(group))
    n[dist.get_rank(group)] = mask.sum()
    dist.all_reduce(n, group=group)
    return torch.dot(losses.flatten(), mask.flatten()) / max(n.sum().item(), 1)


# %% right: names imported one by one; the count by an object, as a Python number
import torch
from torch.distributed import ReduceOp, all_reduce
def rank_loss(losses, mask, group=None):
    work = all_reduce(n := mask.sum().reshape(1).double(), ReduceOp.SUM, group, True)
    mine = (losses * mask).sum()
    work.wait()
    return mine / max(float(n), 1.0)


# %% right: a functional collective; where() in place of the product
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
def rank_loss(losses, mask, group=None):
    n = fc.all_reduce(mask.count_nonzero().float(), "sum", group or dist.group.WORLD)
    return torch.where(mask > 0, losses, 0.0).sum() / torch.clamp_min(n, 1)


# %% right: the counts of all ranks are gathered and added up; without any, the sum of nothing is 0
import torch
import torch.distributed as dist


def rank_loss(losses, mask, group=None):
    mine = mask.sum().reshape(1)
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, mine, group=group)
    everywhere = torch.cat(counts).sum()
    share = (losses * mask).sum()
    return share / everywhere if everywhere > 0 else share * 0.0
