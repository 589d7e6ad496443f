from labkit.answers import Edit, Same

_SUM, _GROUP = "    dist.all_reduce(total, group=group)\n", "    group = dist.new_group([0, dist.get_world_size() - 1])\n"
_NONE = "    if grad is None:\n        return None\n    total = grad.clone()\n"

WRONG = [
    Edit(_SUM, "", mistake="Each copy still has the gradient of its own use only; after one step the two matrices differ."),
    Edit(f"{_SUM}    return total", "    return dist.all_reduce(total, group=group)", mistake="Every rank gets None back. dist.all_reduce changes its tensor and returns nothing."),
    Edit("return total", "return total - grad", mistake="Each copy gets the other's gradient here, without its own."),
    Edit("return total", "return total + grad", mistake="Each copy's own gradient is in its sum twice."),
    Edit("return total", "return total / 2", mistake="Both are gradients of one matrix, from its two uses. They add up; nothing is divided."),
    Edit(_SUM, "    dist.broadcast(total, 0, group=group)\n", mistake="Both copies get the gradient of the first one here, without that of the last."),
    Edit("return total", "return total if dist.get_rank() == 0 else grad", mistake="Only the first rank gets the sum here; the last one returns its own gradient."),
    Edit("total, group=group)", "total, group=group, async_op=True)", told="never waits for its all_reduce"),
    Edit("[0, dist.get_world_size() - 1]", "[0, 1]", told="first and the last rank"),
    Edit(_NONE, "    total = grad\n", told="in no group"),
    Edit(_GROUP + _NONE, _NONE + _GROUP, told="the next group would hang"),
    Edit(_GROUP, "", ("def sync_tied", "GROUP =" + _GROUP.partition("=")[2] + "\n\ndef sync_tied"), ("group=group", "group=GROUP"), told="no process group yet"),
    Edit("    group = dist", "    dist.barrier()\n    group = dist", told="calls barrier"),
]

EQUIVALENT = [
    Same("line 10: `.clone()` dropped", "the caller replaces its gradient by what comes back"),
]


# %% right: an exchange with the other copy
import torch
import torch.distributed as dist
def sync_tied(grad):
    last = dist.get_world_size() - 1
    if grad is None:
        return None
    other = last - dist.get_rank()
    got = torch.empty_like(grad)
    work = dist.isend(grad.contiguous(), other)
    dist.recv(got, other)
    work.wait()
    return grad + got


# %% right: names imported one by one; a group made by its two members only, as torch allows when it is told so
from torch.distributed import all_reduce, get_rank, get_world_size, new_group
def sync_tied(grad):
    ends = [0, get_world_size() - 1]
    if get_rank() not in ends:
        return grad
    group = new_group(ends, use_local_synchronization=True)
    total = grad + 0
    all_reduce(total, group=group)
    return total


# %% right: a functional collective; the group is made once and kept
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


# %% wrong: sends without waiting
# told: never waits for its irecv | never waits for its recv
import torch
import torch.distributed as dist


def sync_tied(grad):
    if grad is None:
        return None
    other = dist.get_world_size() - 1 - dist.get_rank()
    came = torch.zeros_like(grad)
    dist.isend(grad, other)
    dist.irecv(came, other)
    return grad + came
