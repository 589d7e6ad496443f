from labkit.answers import Edit, Same

WRONG = [
    Edit("return total", "return total / 2", told="nothing is divided"),
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
        told="the one on the last rank",
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


# %% right: a group of the two ends, and an all-gather
import torch
import torch.distributed as dist
def sync_tied(grad):
    ends = [0, dist.get_world_size() - 1]
    group = dist.new_group(ends)
    if dist.get_rank() not in ends:
        return grad
    both = [torch.empty_like(grad) for _ in ends]
    dist.all_gather(both, grad, group=group)
    return both[0] + both[1]


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


# %% right: a batch of one send and one receive
import torch
import torch.distributed as dist
def sync_tied(grad):
    n, r = dist.get_world_size(), dist.get_rank()
    if grad is None:
        return None
    came, other = torch.empty(grad.shape, dtype=grad.dtype), n - 1 - r
    ops = [dist.P2POp(dist.isend, grad.contiguous(), other), dist.P2POp(dist.irecv, came, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return came + grad


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
# told: own use only
def sync_tied(grad):
    return grad


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


# %% wrong: group of its members only
# told: every rank calls dist.new_group
import torch
import torch.distributed as dist
def sync_tied(grad):
    if grad is None:
        return None
    group = dist.new_group([0, dist.get_world_size() - 1])
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


# %% wrong: group of two neighbours
# told: not part of group | group | rank
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, 1])
    if grad is None:
        return None
    dist.all_reduce(grad, group=group)
    return grad


# %% wrong: in steps of the whole pipeline
# told: holds no copy
# the gradient is passed on from rank to rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    n, r = dist.get_world_size(), dist.get_rank()
    if n == 2:
        total = grad.clone()
        dist.all_reduce(total)
        return total
    shape = [None]
    box = [None if grad is None else grad.contiguous()]
    for root in (0, n - 1):
        box = [grad if r == root else None]
        dist.broadcast_object_list(box, src=root)
        shape.append(box[0])
    return None if grad is None else shape[1] + shape[2]


# %% wrong: last rank only
# told: the one on the last rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(grad.contiguous(), last)
    elif dist.get_rank() == last:
        got = torch.empty(grad.shape, dtype=grad.dtype)
        dist.recv(got, 0)
        return grad + got
    return grad


# %% wrong: mean over all ranks
# told: nothing is divided
import torch.distributed as dist


def sync_tied(grad):
    n = dist.get_world_size()
    group = dist.new_group([0, n - 1])
    if grad is None:
        return None
    dist.all_reduce(grad, group=group)
    return grad / n


# %% wrong: middle ranks take part
# told: holds no copy
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    shape = [None] * n
    dist.all_gather_object(shape, None if grad is None else grad.shape)
    total = torch.zeros(shape[0]) if grad is None else grad.clone()
    dist.all_reduce(total)
    return None if grad is None else total


# %% wrong: own gradient twice
# told: own gradient is in its sum twice
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return grad + total


# %% wrong: ranks 0 and 3
# told: rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    group = dist.new_group([0, 3 if n > 3 else 1])
    if grad is None:
        return None
    total = grad.clone()
    if dist.get_rank() in (0, 3 if n > 3 else 1):
        dist.all_reduce(total, group=group)
    return total


# %% wrong: returns what all reduce does
# told: changes its tensor and returns nothing
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    return dist.all_reduce(grad, group=group)


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


# %% wrong: swapped
# told: gets the other's gradient here
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


# %% wrong: zeros between
# told: holds no copy | expected None
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    size = torch.tensor([0, 0] if grad is None else list(grad.shape))
    dist.broadcast(size, 0)
    total = torch.zeros(size.tolist()) if grad is None else grad.contiguous().clone()
    dist.all_reduce(total)
    return None if grad is None else total.to(grad.dtype)
