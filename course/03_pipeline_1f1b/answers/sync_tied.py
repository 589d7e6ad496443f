from labkit.answers import Edit, Same

WRONG = [
    Edit("return total", "return total / 2", mistake="Both are gradients of one matrix, from its two uses. They add up; nothing is divided."),
    Edit("total, group=group)", "total, group=group, async_op=True)", told="never waits for its all_reduce"),
    Edit("[0, dist.get_world_size() - 1]", "[0, 1]", told="first and the last rank"),
    Edit(
        "    if grad is None:\n        return None\n    total = grad.clone()\n",
        "    total = grad\n",
        told="in no group",
    ),
    Edit("    group = dist", "    dist.barrier()\n    group = dist", told="calls barrier"),
    # broadcast
    Edit(
        """total = grad.clone()
    dist.all_reduce(total, group=group)""",
        """total = grad.contiguous().clone()
    dist.broadcast(total, 0, group=group)""",
        mistake="Both copies need the sum: the one on the first and the one on the last rank.",
    ),
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


# %% right: a group of the two ends, and an all-reduce in place
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    groups = [dist.new_group([0, n - 1])]
    if dist.get_rank() in (0, n - 1):
        dist.all_reduce(grad, group=groups[0])
    return grad


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


# %% wrong: does not communicate
# mistake: Each copy still has the gradient of its own use only; after one step the two matrices differ.
def sync_tied(grad):
    return grad


# %% wrong: group of two neighbours
# mistake: A rank between holds no copy: it gets None and returns None.
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, 1])
    if grad is None:
        return None
    dist.all_reduce(grad, group=group)
    return grad


# %% wrong: own gradient twice
# mistake: Each copy's own gradient is in its sum twice.
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return grad + total


# %% wrong: returns what all reduce does
# mistake: Every rank gets None back. dist.all_reduce changes its tensor and returns nothing.
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    return dist.all_reduce(grad, group=group)


# %% wrong: swapped
# mistake: Each copy gets the other's gradient here, without its own.
import torch
import torch.distributed as dist


def sync_tied(grad):
    if grad is None:
        return None
    other = dist.get_world_size() - 1 - dist.get_rank()
    got = torch.empty_like(grad)
    for message in [dist.isend(grad, other), dist.irecv(got, other)]:
        message.wait()
    return got


# %% wrong: group at import
# told: no process group yet
import torch.distributed as dist

GROUP = dist.new_group([0, dist.get_world_size() - 1])


def sync_tied(grad):
    if grad is None:
        return None
    total = grad.clone()
    dist.all_reduce(total, group=GROUP)
    return total


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


