from labkit.answers import Edit, Same

_OWN = "Every rank still has its own tensor, as if nothing had arrived."
_NOT_FINISHED = "Each part ends as the input of one rank alone: what the second half sends is not finished."
_FROM_THE_END = "a negative index counts from the end: parts[-1] is parts[n - 1]"
_PHASE_1 = "parts[receive].add_(pass_on((rank - k) % n, receive))"

WRONG = [
    Edit("return total.view_as(x)", "return x.clone()", mistake=_OWN),
    Edit("total = x.clone().flatten()", "copy = x.clone()\n    total = copy.reshape(-1)", ("total.view_as(x)", "copy"),
         mistake=_OWN),
    Edit("total.view_as(x)", "total.view_as(x) / n", mistake="This is the mean. A sum does not divide."),
    Edit("(n - 1):\n        receive = (rank - k) % n", "(0):\n        receive = (rank - k) % n",
         mistake="Each part is finished on one rank only. The finished parts have to reach the others."),
    Edit(".copy_(", ".add_(",
         mistake="The second half still adds what arrives. What arrives there is finished already."),
    Edit(".add_(", ".copy_(", mistake=_NOT_FINISHED),
    Edit("(rank - k) % n\n", "(rank - k - 1) % n\n", ("(rank + 1 - k)", "(rank - k)"), mistake=_NOT_FINISHED),
    Edit(
        _PHASE_1,
        "arrived = pass_on((rank - k) % n, receive)\n        sums[receive].add_(arrived)\n        "
        "parts[receive].copy_(arrived)",
        ("    for k in range(n - 1):\n        receive = (rank - k - 1)",
        "    sums = [part.clone() for part in parts]\n    for k in range(n - 1):\n        receive = (rank - k - 1)"),
        ("    for k in range(n - 1):\n        receive = (rank - k) %",
        "    for part, finished in zip(parts, sums):\n        part.copy_(finished)\n    for k in range(n - 1):\n       "
        " receive = (rank - k) %"),
        mistake="You send on what has arrived, without this rank's own numbers. From step 2 on a rank sends the sum "
                "that it has just made.",
    ),
    Edit("    right, left", "    assert n > 1\n    right, left", told="AssertionError"),
    Edit("tensor_split(n)", "chunk(n)", told="IndexError"),
    Edit("x.clone().flatten()", "x.float().flatten().clone()", ("total.view_as(x)", "total.view_as(x).to(x.dtype)"),
         told="another dtype"),
    Edit("        sending.wait()\n", "", told="never waits for its send"),
    # the ring the other way round
    Edit("(rank + 1) % n, (rank - 1) % n", "(rank - 1) % n, (rank + 1) % n\n    rank = -rank % n",
         told="the next rank only"),
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


# %% wrong: the whole tensor passes all ranks
# told: 2 (N-1)/N n is
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, going = x.contiguous().clone(), x.contiguous().clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(going)
        sending = dist.isend(going, (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        total, going = total + arriving, arriving
    return total


# %% wrong: calls all_reduce
# told: allowed here: send, recv
import torch.distributed as dist
def ring_all_reduce(x):
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total
