# told: mean of the ranks' means
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    return (losses * mask).sum() / mask.sum() / dist.get_world_size()
