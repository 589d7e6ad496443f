from labkit.answers import Edit, Same

_FROM_THE_END = "a negative index counts from the end: parts[-1] is parts[n - 1]"

WRONG = [
    Edit("return total.view_as(x)", "return total.view_as(x) / n", mistake="This is the mean. A sum does not divide."),
    Edit(".add_(", ".copy_(", told="Phase 1"),
]

EQUIVALENT = [
    Same("line 14: `.clone()` dropped", "a part is changed again only after the send has been waited for"),
    Same("line 20: `% n` dropped", _FROM_THE_END),
    Same("line 21: `% n` dropped", _FROM_THE_END),
    Same("line 23: `% n` dropped", _FROM_THE_END),
]


# %% right: one loop for both phases, on a padded flat tensor
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    r, n = dist.get_rank(), dist.get_world_size()
    size = -(-x.numel() // n)
    flat = torch.zeros(size * n, dtype=x.dtype)
    flat[: x.numel()] = x.flatten()
    parts = list(flat.chunk(n))
    for k in range(2 * n - 2):
        got = torch.empty(size, dtype=x.dtype)
        w = dist.isend(parts[(r - k) % n].contiguous(), (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        w.wait()
        j = (r - k - 1) % n
        parts[j] = parts[j] + got if k < n - 1 else got
    return torch.cat(parts)[: x.numel()].view_as(x)


# %% right: names imported one by one; the first parts are shorter, the last takes the rest
import torch
from torch.distributed import get_rank, get_world_size, irecv, isend
def ring_all_reduce(x):
    me, n = get_rank(), get_world_size()
    flat = x.reshape(-1).clone()
    size = flat.numel() // n
    cuts = [slice(i * size, (i + 1) * size if i < n - 1 else None) for i in range(n)]
    for k in range(2 * (n - 1)):
        give, take = cuts[(me - k) % n], cuts[(me - k - 1) % n]
        came = torch.zeros_like(flat[take])
        works = [isend(flat[give].clone(), dst=(me + 1) % n), irecv(came, src=(me - 1) % n)]
        for work in works:
            work.wait()
        flat[take] = flat[take] + came if k < n - 1 else came
    return flat.reshape(x.shape)


# %% right: two generators, one for each phase; every second number is a part
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    n, r = dist.get_world_size(), dist.get_rank()
    y = x.contiguous().view(-1)
    parts = [y[i::n].clone() for i in range(n)]
    def steps(first):
        for k in range(n - 1):
            yield (r + first - k) % n, (r + first - 1 - k) % n
    def swap(send, receive):
        box = parts[receive].new_empty(parts[receive].shape)
        work = dist.isend(parts[send], (r + 1) % n)
        dist.recv(box, (r - 1) % n)
        work.wait()
        return box
    for send, receive in steps(0):
        parts[receive] = swap(send, receive) + parts[receive]
    for send, receive in steps(1):
        parts[receive] = swap(send, receive)
    out = torch.empty_like(y)
    for i, part in enumerate(parts):
        out[i::n] = part
    return out.view(x.shape)


# %% right: blocking calls, even ranks send first; one loop over both halves
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    N, r = dist.get_world_size(), dist.get_rank()
    out = x.clone(memory_format=torch.contiguous_format)
    if N == 1:
        return out
    parts = out.view(-1).tensor_split(N)
    for k in range(2 * N - 2):
        a, b = parts[(r - k) % N], parts[(r - k - 1) % N]
        got = torch.empty_like(b)
        if r % 2 == 0:
            dist.send(a, (r + 1) % N); dist.recv(got, (r - 1) % N)
        else:
            dist.recv(got, (r - 1) % N); dist.send(a, (r + 1) % N)
        if k < N - 1:
            b += got
        else:
            b.copy_(got)
    return out


# %% wrong: adds in both phases
# mistake: The second half still adds what arrives. What arrives there is finished already.
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(2 * (n - 1)):
        box = torch.empty_like(parts[(rank - k - 1) % n])
        work = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        work.wait()
        parts[(rank - k - 1) % n].add_(box)
    return y.view_as(x)


# %% wrong: clone keeps the strides
# mistake: Every rank still has its own tensor, as if nothing had arrived.
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    out = x.clone()
    parts = out.reshape(-1).tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return out


# %% wrong: first phase only
# mistake: Each part is finished on one rank only. The finished parts have to reach the others.
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(n - 1):
        box = torch.empty_like(parts[(rank - k - 1) % n])
        work = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        work.wait()
        parts[(rank - k - 1) % n].add_(box)
    return y.view_as(x)


# %% wrong: passes on what arrived
# mistake: You send on what has arrived, without this rank's own numbers. From step 2 on a rank sends the sum that it has just made.
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    # sends on what has arrived, not the sum
    N, r = dist.get_world_size(), dist.get_rank()
    out = x.clone(memory_format=torch.contiguous_format)
    parts = out.view(-1).tensor_split(N)
    going = parts[r].clone()
    for k in range(N - 1):
        b = parts[(r - k - 1) % N]
        got = torch.empty_like(b)
        w = dist.isend(going, (r + 1) % N); dist.recv(got, (r - 1) % N); w.wait()
        b += got
        going = got
    for k in range(N - 1):
        a, b = parts[(r + 1 - k) % N], parts[(r - k) % N]
        got = torch.empty_like(b)
        w = dist.isend(a, (r + 1) % N); dist.recv(got, (r - 1) % N); w.wait()
        b.copy_(got)
    return out


# %% wrong: second phase as the first
# mistake: Each part ends as the input of one rank. The second half sends parts that are not finished.
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.contiguous().clone().flatten()
    parts = total.tensor_split(n)
    for step, k in enumerate([*range(n - 1), *range(n - 1)]):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if step < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: asserts more than one rank
# told: AssertionError
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    assert n > 1
    total = x.contiguous().clone().flatten()
    parts = total.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: calls all reduce
# told: Phase 1
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


