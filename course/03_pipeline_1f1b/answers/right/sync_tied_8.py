# the group is made at the first call and kept; what is asynchronous is waited for
import torch.distributed as dist
GROUP = None
def sync_tied(grad):
    global GROUP
    GROUP = GROUP or dist.new_group([0, dist.get_world_size() - 1])
    if grad is not None:
        dist.all_reduce(grad, group=GROUP, async_op=True).wait()
    return grad
