from labkit.answers import Edit

WRONG = [
    Edit("count.clamp(min=1.0)", "(count + 1.0)", told="all-reduced number"),
    # a mean of shares: right where all ranks have as many places
    Edit(
        "mask.sum()",
        "mask.mean()",
        ("(losses * mask).sum()", "(losses * mask).mean()"),
        ("min=1.0", "min=1e-6"),
        mistake="You add up the shares of tokens that count. Ranks may have other numbers of tokens: add up their" " counts.",
    ),
    # a python number
    Edit("sum() / count.clamp(min=1.0)", "sum().item() / max(count.item(), 1.0)", mistake="On a rank without a counted token your loss has no gradient, so backward() fails there. Its " "gradient is 0."),
    # an empty rank counts one
    Edit(
        "count = mask.sum()",
        "count = mask.sum().clamp(min=1.0)",
        ("count.clamp(min=1.0)", "count"),
        mistake="Your divisor is too large where a rank has no counted token: a rank without any adds 0 to the " "count.",
    ),
    # at least two tokens
    Edit("clamp(min=1.0)", "clamp(min=2.0)", told="number of counted tokens"),
    # averages over ranks too
    Edit("clamp(min=1.0)", "clamp(min=1.0) / dist.get_world_size(group)", mistake="You divide by the number of ranks as well. The gradients are summed over ranks, not averaged."),
    # changes the mask
    Edit(
        "return (losses * mask).sum() / count.clamp(min=1.0)",
        """mask /= count.clamp(min=1.0)
    return (losses * mask).sum()""",
        told="changes",
    ),
    # counts the world of a group
    Edit(
        "count = mask.sum()",
        "count = mask.sum() / dist.get_world_size(group)",
        ("count.clamp", "(count * dist.get_world_size()).clamp"),
        told="number of counted tokens",
    ),
    # detached
    Edit(
        "return (losses * mask).sum() / count.clamp(min=1.0)",
        "return torch.tensor(float((losses * mask).sum() / count.clamp(min=1.0)))",
        mistake="On a rank without a counted token your loss has no gradient, so backward() fails there. Its " "gradient is 0.",
    ),
    # divides by nothing when nothing counts
    Edit("count.clamp(min=1.0)", "count", mistake="That is 0 / 0. The loss is 0 where no rank of the group counts a token."),
    # for gradients that are averaged
    Edit(
        "sum() / count.clamp(min=1.0)",
        "sum() * dist.get_world_size(group) / count.clamp(min=1)",
        mistake="You divide by the number of ranks as well. The gradients are summed over ranks, not averaged.",
    ),
    # ignores the group
    Edit("dist.all_reduce(count, group=group)", "dist.all_reduce(count)", mistake="You count the tokens of all ranks; asked are those of the ranks in `group`."),
    # losses of padding
    Edit(
        "return (losses * mask).sum() / count.clamp(min=1.0)",
        "return losses.sum() / count.clamp(min=1)",
        mistake="The losses where the mask is 0 are in your sum.",
    ),
    # masked afterwards
    Edit("return (losses * mask)", "return losses.mean() * mask", told="number of counted tokens"),
    # returns early where nothing counts
    Edit(
        "count = mask.sum()",
        """count = mask.sum()
    if count == 0:
        return (losses * mask).sum()""",
        ("count.clamp(min=1.0)", "count"),
        told="Every rank of the group takes part",
    ),
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


# %% wrong: divides by own count
# mistake: You divide by this rank's own count. The batch is spread over all ranks.
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum() / mask.sum()


# %% wrong: is reduced already
# mistake: Your loss is the mean over all ranks already. Asked is this rank's share, which the caller sums.
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count, total = mask.sum(), (losses * mask).sum()
    dist.all_reduce(count, group=group)
    loss = total / count.clamp(min=1.0)
    dist.all_reduce(loss, group=group)
    return loss


# %% wrong: mean of means
# mistake: This is the mean of the ranks' means. All tokens should weigh the same, and here all ranks do.
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum() / mask.sum() / dist.get_world_size()


# %% wrong: not divided
# mistake: This is a sum, and nothing divides it. Asked is a share of a mean.
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum()


# %% wrong: one rank counts
# mistake: You count all tokens, and only those with a 1 in the mask count.
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum() * dist.get_world_size(group)
    dist.broadcast(count, dist.get_process_group_ranks(group)[0] if group else 0, group=group)
    return (losses * mask).sum() / count.clamp(min=1.0)


# %% wrong: sequences weigh the same
# mistake: You take the mean of the sequences' means. All tokens should weigh the same, and here all sequences do.
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    per = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
    n = torch.tensor(float(len(per)))
    dist.all_reduce(n, group=group)
    return per.sum() / n
