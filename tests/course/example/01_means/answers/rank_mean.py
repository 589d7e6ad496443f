from labkit.answers import Edit

WRONG = [
    Edit("float(both[0] / both[1])", "float(both[0] / both[1]) / dist.get_world_size(group)",
         mistake="This divides by the number of ranks as well."),
    Edit("    dist.all_reduce(both, group=group)\n", "", mistake="This is the mean of one rank's own tokens."),
    Edit(", group=group)", ")", told="with a group smaller than the world"),
]  # fmt: skip


# %% wrong: the mean of means
# mistake: This is the mean of means: a rank with few tokens counts as much as one with many.
import torch
import torch.distributed as dist
def rank_mean(losses, mask, group):
    mean = (losses * mask).sum() / mask.sum()
    dist.all_reduce(mean, group=group)
    return float(mean / dist.get_world_size(group))


# %% wrong: two messages
# told: calls all_reduce 2 times
import torch.distributed as dist
def rank_mean(losses, mask, group):
    total, count = (losses * mask).sum(), mask.sum()
    dist.all_reduce(total, group=group)
    dist.all_reduce(count, group=group)
    return float(total / count)


# %% right: in float64
import torch
import torch.distributed as dist
def rank_mean(losses, mask, group):
    both = torch.tensor([float(losses @ mask), float(mask.sum())], dtype=torch.float64)
    dist.all_reduce(both, group=group)
    return (both[0] / both[1]).item()
