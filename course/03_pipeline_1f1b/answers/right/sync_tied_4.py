# names imported one by one; a group made by its two members only, as torch allows when it is told so
from torch.distributed import all_reduce, get_rank, get_world_size, new_group
def sync_tied(grad):
    ends = [0, get_world_size() - 1]
    if get_rank() not in ends:
        return grad
    group = new_group(ends, use_local_synchronization=True)
    total = grad + 0
    all_reduce(total, group=group)
    return total
