# a functional collective; the group is made once and kept
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
GROUPS = {}
def sync_tied(grad):
    n = dist.get_world_size()
    if n not in GROUPS:
        GROUPS[n] = dist.new_group((0, n - 1))
    if grad is None:
        return None
    return fc.wait_tensor(fc.all_reduce(grad.contiguous(), "sum", GROUPS[n]))
