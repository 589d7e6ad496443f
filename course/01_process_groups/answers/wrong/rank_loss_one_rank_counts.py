# told: all tokens | number of counted tokens
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum() * dist.get_world_size(group)
    dist.broadcast(count, dist.get_process_group_ranks(group)[0] if group else 0, group=group)
    return (losses * mask).sum() / count.clamp(min=1.0)
