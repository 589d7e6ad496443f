from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])",
        "out",
        ("torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])", "y"),
        mistake="The rows arrive by sender, and are left so. An expert wants its own in one piece.",
    ),
    Edit(
        "torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])",
        "y",
        mistake="`y` is sorted by expert; before it travels its blocks must be back in the order in which they " "came, by sender.",
    ),
    Edit(
        "blocks.contiguous()",
        "blocks.T.contiguous()",
        (
            "    by_expert",
            """    blocks = blocks.T
    by_expert""",
        ),
        mistake="blocks[i, e]: the rows that rank i sends to expert e of this rank, [P, E/P].",
    ),
    # arrives by sender, goes home as if grouped
    Edit(
        "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])",
        "out",
        mistake="`dispatch` leaves the rows by sender, and `combine` takes them for grouped by expert. An expert " "wants its own in one piece.",
    ),
    # stays away when it has nothing to send
    Edit(
        "    splits = blocks.sum(1).tolist(), counts",
        """    if not len(rows) and not len(out):
        return out, blocks
    splits = blocks.sum(1).tolist(), counts.flip(0)""",
        mistake="The rows of an expert stand by sender: those of rank 0 first, then those of rank 1.",
    ),
]

EQUIVALENT = [
    Same("line 15: `.contiguous()` dropped", "a view holds the same numbers"),
]


# %% right: counts by an all-to-all of their own, rows in one index
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce

def order(blocks):
    n, starts = blocks.flatten(), blocks.flatten().cumsum(0) - blocks.flatten()
    P, local = blocks.shape
    places = [torch.arange(n[i * local + e]) + starts[i * local + e] for e in range(local) for i in range(P)]
    return torch.cat(places)
def exchange(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out
def dispatch(rows, counts, ep):
    blocks = torch.empty_like(counts)
    dist.all_to_all_single(blocks, counts, group=ep.group)
    blocks = blocks.view(ep.size, -1)
    got = exchange(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    return got[order(blocks)], blocks
def combine(y, blocks, counts, ep):
    back = torch.empty_like(y)
    back[order(blocks)] = y
    return exchange(back, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% right: functional collectives, one-hot order
import torch
import torch.distributed._functional_collectives as funcol


def dispatch(rows, counts, ep):
    n = len(counts) // ep.size
    blocks = funcol.all_to_all_single(counts, [n] * ep.size, [n] * ep.size, ep.group).view(ep.size, n) + 0
    ins, outs = counts.view(ep.size, n).sum(1).tolist(), blocks.sum(1).tolist()
    got = funcol.all_to_all_single(rows.contiguous(), outs, ins, ep.group)
    expert = torch.arange(n).expand(ep.size, n).flatten().repeat_interleave(blocks.flatten())
    return got[expert.argsort(stable=True)], blocks


def combine(y, blocks, counts, ep):
    n = blocks.shape[1]
    expert = torch.arange(n).expand(ep.size, n).flatten().repeat_interleave(blocks.flatten())
    back = y[expert.argsort(stable=True).argsort()]
    ins, outs = blocks.sum(1).tolist(), counts.view(ep.size, n).sum(1).tolist()
    return funcol.all_to_all_single(back, outs, ins, ep.group) + 0


# %% right: counts as Python objects, an autograd-aware all-to-all
import torch
import torch.distributed as dist
import torch.distributed.nn as dnn


def move(x, outs, ins, ep):
    out = x.new_empty((sum(outs), x.shape[1]))
    return dnn.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)


def dispatch(rows, counts, ep):
    told = [None] * ep.size
    dist.all_gather_object(told, counts.tolist(), group=ep.group)
    n = len(counts) // ep.size
    mine = [one[ep.rank * n : (ep.rank + 1) * n] for one in told]
    ins = [int(sum(counts.tolist()[r * n : (r + 1) * n])) for r in range(ep.size)]
    got = move(rows, [sum(b) for b in mine], ins, ep)
    keys = [(e, i) for i in range(ep.size) for e in range(n) for _ in range(mine[i][e])]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return got[torch.tensor(order, dtype=torch.long)], torch.tensor(mine)


def combine(y, blocks, counts, ep):
    mine, n = blocks.tolist(), blocks.shape[1]
    keys = [(e, i) for i in range(ep.size) for e in range(n) for _ in range(mine[i][e])]
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.long)
    back = torch.zeros_like(y).index_copy(0, order, y)
    return move(back, counts.view(ep.size, n).sum(1).tolist(), [sum(b) for b in mine], ep)


# %% right: batch_isend_irecv without empty messages
import torch
import torch.distributed as dist

def _exchange(x, sent, came, ep):
    parts = x.contiguous().split(sent)
    got = [x.new_empty(n, *x.shape[1:]) for n in came]
    got[ep.rank].copy_(parts[ep.rank])
    ops = []
    for other in range(ep.size):
        if other != ep.rank:
            there = dist.get_global_rank(ep.group, other)
            if sent[other]:
                ops.append(dist.P2POp(dist.isend, parts[other].contiguous(), there, group=ep.group))
            if came[other]:
                ops.append(dist.P2POp(dist.irecv, got[other], there, group=ep.group))
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return torch.cat(got)

def dispatch(rows, counts, ep):
    per = len(counts) // ep.size
    blocks = _exchange(counts, [per] * ep.size, [per] * ep.size, ep).view(ep.size, per)
    got = _exchange(rows, counts.view(-1, per).sum(1).tolist(), blocks.sum(1).tolist(), ep)
    pieces = got.split(blocks.flatten().tolist())
    return torch.cat([p for e in range(per) for p in pieces[e::per]]), blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    pieces = y.split(blocks.T.flatten().tolist())
    y = torch.cat([p for i in range(ep.size) for p in pieces[i :: ep.size]])
    return _exchange(y, blocks.sum(1).tolist(), counts.view(-1, per).sum(1).tolist(), ep)


# %% wrong: dealt out
# mistake: Here rank r holds every P-th expert. It holds E/P that follow each other.
import torch
import torch.distributed as dist

def dispatch(rows, counts, ep):
    per = counts.numel() // ep.size
    dealt = counts.view(per, ep.size).T.contiguous()
    pieces = rows.split(counts.tolist())
    rows = torch.cat([pieces[e * ep.size + r] for r in range(ep.size) for e in range(per)])
    blocks = torch.empty_like(dealt)
    dist.all_to_all_single(blocks, dealt, group=ep.group)
    out = rows.new_empty(int(blocks.sum()), rows.shape[1])
    dist.all_to_all_single(out, rows, blocks.sum(1).tolist(), dealt.sum(1).tolist(), group=ep.group)
    parts = out.split(blocks.flatten().tolist())
    return torch.cat([parts[i * per + e] for e in range(per) for i in range(ep.size)]), blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    dealt = counts.view(per, ep.size).T.contiguous()
    parts = y.split(blocks.T.flatten().tolist())
    y = torch.cat([parts[e * ep.size + i] for i in range(ep.size) for e in range(per)])
    out = y.new_empty(int(counts.sum()), y.shape[1])
    dist.all_to_all_single(out, y, dealt.sum(1).tolist(), blocks.sum(1).tolist(), group=ep.group)
    parts = out.split(dealt.flatten().tolist())
    return torch.cat([parts[r * per + e] for e in range(per) for r in range(ep.size)])


# %% wrong: grouped again
# mistake: `combine` does the step of `dispatch` once more: it moves rows to where they stood before that step only by chance. The way back needs its inverse.
import torch
import torch.distributed as dist

def dispatch(rows, counts, ep):
    per = counts.numel() // ep.size
    blocks = torch.empty_like(counts).view(ep.size, per)
    dist.all_to_all_single(blocks, counts.view(ep.size, per), group=ep.group)
    out = rows.new_empty(int(blocks.sum()), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), blocks.sum(1).tolist(), counts.view(-1, per).sum(1).tolist(), group=ep.group)
    order = torch.arange(per).repeat(ep.size).repeat_interleave(blocks.flatten()).argsort(stable=True)
    return out[order], blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    order = torch.arange(per).repeat(ep.size).repeat_interleave(blocks.flatten()).argsort(stable=True)
    y = y[order]
    out = y.new_empty(int(counts.sum()), y.shape[1])
    dist.all_to_all_single(out, y, counts.view(-1, per).sum(1).tolist(), blocks.sum(1).tolist(), group=ep.group)
    return out


# %% wrong: as many ranks as experts
# the way back is turned round as if P = E/P
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * local + i] for i in range(local) for e in range(ep.size)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: splits of experts
# told: The splits do not fit the rows
# the output splits stand in the place of the input splits
import torch
import torch.distributed as dist


def dispatch(rows, counts, ep):
    local = len(counts) // ep.size
    blocks = torch.empty_like(counts)
    dist.all_to_all_single(blocks, counts, group=ep.group)
    blocks = blocks.view(ep.size, local)
    outs, ins = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    got = rows.new_empty(sum(outs), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), ins, outs, group=ep.group)
    return got, blocks


def combine(y, blocks, counts, ep):
    return y


