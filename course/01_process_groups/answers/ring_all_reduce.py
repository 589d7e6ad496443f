from labkit.answers import Edit, Same

_FROM_THE_END = "a negative index counts from the end: parts[-1] is parts[n - 1]"

WRONG = [
    Edit("return total.view_as(x)", "return total.view_as(x) / n", told="does not divide"),
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


# %% right: even ranks send first, odd ranks receive first, with blocking calls; the last of an odd ring waits for its turn
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    n, r = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return x.clone()
    whole = x.clone().flatten()
    parts = whole.tensor_split(n)
    for k in range(2 * n - 2):
        new = torch.empty_like(parts[(r - k - 1) % n])
        def send(): dist.send(parts[(r - k) % n].clone(), (r + 1) % n)
        def recv(): dist.recv(new, (r - 1) % n)
        for do in ((send, recv) if r % 2 == 0 else (recv, send)):
            do()
        mine = parts[(r - k - 1) % n]
        mine.copy_(mine + new if k < n - 1 else new)
    return whole.view(x.shape)


# %% right: the parts in a matrix with N rows, padded with zeros; one loop for both phases
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    width = -(-x.numel() // n)
    parts = torch.zeros(n, width, dtype=x.dtype)
    parts.view(-1)[: x.numel()] = x.reshape(-1)
    going = rank
    for step in range(2 * (n - 1)):
        message, box = parts[going].clone(), torch.empty(width, dtype=x.dtype)
        coming = dist.irecv(box, (rank - 1) % n)
        dist.send(message, (rank + 1) % n)
        coming.wait()
        going = (going - 1) % n
        parts[going] = box + parts[going] if step < n - 1 else box
    return parts.view(-1)[: x.numel()].reshape(x.shape)


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
# told: still adds
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


# %% wrong: blocking send first
# told: deadlock: rank 0 waits in send
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(2 * (n - 1)):
        receive = (rank - k - 1) % n
        box = torch.empty_like(parts[receive])
        dist.send(parts[(rank - k) % n], (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        parts[receive].copy_(box + parts[receive] if k < n - 1 else box)
    return y.view_as(x)


# %% wrong: calls all reduce
# told: Phase 1
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


# %% wrong: chain that adds then copies
# told: 2 (N-1)/N n
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    N, r = dist.get_world_size(), dist.get_rank()
    total = x.clone().contiguous()
    if N == 1:
        return total
    got = torch.empty_like(total)
    if r > 0:
        dist.recv(got, r - 1); total += got
    if r < N - 1:
        dist.send(total, r + 1)
    # now the last has the sum: once more around
    if r == N - 1:
        dist.send(total, 0)
    else:
        dist.recv(total, (r - 1) % N)
        if r < N - 2:
            dist.send(total, r + 1)
    return total


# %% wrong: changes its input
# told: changes
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.flatten()
    parts = total.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x).clone()


# %% wrong: clone keeps the strides
# told: Every rank still has its own tensor
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


# %% wrong: cuts rows
# told: 2 (N-1)/N n is 32
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    out = x.clone()
    parts = out.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty(parts[receive].shape, dtype=x.dtype)
        sending = dist.isend(parts[(rank - k) % n].contiguous().clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return out


# %% wrong: each part straight to its owner
# told: next rank only
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    # each part straight to its owner, then straight to all: as few bytes, but not to the neighbour
    N, r = dist.get_world_size(), dist.get_rank()
    out = x.clone(memory_format=torch.contiguous_format)
    parts = out.view(-1).tensor_split(N)
    others = [(r + i) % N for i in range(1, N)]
    ws = [dist.isend(parts[o], o) for o in others]
    got = {o: torch.empty_like(parts[r]) for o in others}
    for o in others:
        dist.recv(got[o], o)
    for w in ws: w.wait()
    for o in others: parts[r].add_(got[o])
    ws = [dist.isend(parts[r], o) for o in others]
    for o in others:
        dist.recv(parts[o], o)
    for w in ws: w.wait()
    return out


# %% wrong: equal parts only
# told: size
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    parts = list(total.view(n, -1))
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total


# %% wrong: first phase only
# told: finished on one rank only
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


# %% wrong: float32 boxes
# told: float64
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone().flatten().float()
    parts = total.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: left of rank 0 is minus one
# told: no rank -1
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone().flatten()
    parts = total.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, rank - 1)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: loses the rest
# told: hidden | expected
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone().flatten()
    parts = total[: total.numel() // n * n].view(n, -1)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: messages of float32
# told: another dtype
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    N, r = dist.get_world_size(), dist.get_rank()
    out = x.clone(memory_format=torch.contiguous_format)
    parts = out.view(-1).tensor_split(N)
    for k in range(2 * N - 2):
        a, b = parts[(r - k) % N], parts[(r - k - 1) % N]
        got = torch.empty(b.shape)
        w = dist.isend(a.float(), (r + 1) % N); dist.recv(got, (r - 1) % N); w.wait()
        if k < N - 1:
            b += got
        else:
            b.copy_(got)
    return out


# %% wrong: never waits for its sends
# told: never waits for its send
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone().flatten()
    parts = total.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: parts by chunk
# told: IndexError
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    total = x.clone().flatten()
    parts = total.chunk(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), right)
        dist.recv(arriving, left)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: passes on what arrived
# told: without this rank's own numbers
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


# %% wrong: returns a flat tensor
# told: shape
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(2 * (n - 1)):
        receive = (rank - k - 1) % n
        box = torch.empty_like(parts[receive])
        work = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        work.wait()
        parts[receive].copy_(box + parts[receive] if k < n - 1 else box)
    return y


# %% wrong: round trip of the whole
# told: 2 (N-1)/N n
# one sum travels from rank 0 round the ring, and then the result once more
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone().contiguous()
    if n == 1:
        return total
    got = torch.empty_like(total)
    if rank > 0:
        dist.recv(got, rank - 1)
        total += got
    dist.send(total, (rank + 1) % n)
    if rank == 0:
        dist.recv(total, n - 1)
    elif rank < n - 1:
        dist.recv(total, rank - 1)
    if rank < n - 2:
        dist.send(total, rank + 1)
    return total


# %% wrong: second phase as the first
# told: sends parts that are not finished
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


# %% wrong: sends whole tensors
# told: Phase
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    r, n, total, moving = dist.get_rank(), dist.get_world_size(), x.clone(), x
    for _ in range(n - 1):
        got = torch.empty_like(x)
        w = dist.isend(moving, (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        w.wait()
        total, moving = total + got, got
    return total


# %% wrong: to the left
# told: next rank only
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone().flatten()
    parts = total.tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank + k + 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank + k) % n].clone(), (rank - 1) % n)
        dist.recv(arriving, (rank + 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)


# %% wrong: views a transpose
# told: view size is not compatible
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    out = x.clone()
    parts = out.view(-1).tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return out
