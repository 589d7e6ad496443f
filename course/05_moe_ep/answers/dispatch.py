from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])",
        "out",
        ("torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])", "y"),
        told="arrive by sender",
    ),
    Edit(
        "torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])",
        "y",
        told="back in the order in which they came",
    ),
    Edit(
        "blocks.contiguous()",
        "blocks.T.contiguous()",
        (
            "    by_expert",
            """    blocks = blocks.T
    by_expert""",
        ),
        told="blocks[i, e]",
    ),
    # arrives by sender, goes home as if grouped
    Edit(
        "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])",
        "out",
        told="takes them for grouped",
    ),
    # stays away when it has nothing to send
    Edit(
        "    splits = blocks.sum(1).tolist(), counts",
        """    if not len(rows) and not len(out):
        return out, blocks
    splits = blocks.sum(1).tolist(), counts.flip(0)""",
        told="rank",
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


# %% right: messages from rank to rank, one for each pair of ranks that has something to say
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce

def swap(parts, shapes, ep):
    got, works = [], []
    for r in range(ep.size):
        got.append(parts[r] if r == ep.rank else parts[r].new_empty(shapes[r], *parts[r].shape[1:]))
    for r in range(ep.size):
        if r != ep.rank and shapes[r]:
            works.append(dist.irecv(got[r], ep.ranks[r], group=ep.group))
        if r != ep.rank and len(parts[r]):
            works.append(dist.isend(parts[r].contiguous(), ep.ranks[r], group=ep.group))
    [work.wait() for work in works]
    return got
def dispatch(rows, counts, ep):
    blocks = torch.stack(swap(list(counts.view(ep.size, -1)), [len(counts) // ep.size] * ep.size, ep))
    got = swap(list(rows.split(counts.view(ep.size, -1).sum(1).tolist())), blocks.sum(1).tolist(), ep)
    pieces = [part.split(block.tolist()) for part, block in zip(got, blocks)]
    return torch.cat([p[e] for e in range(blocks.shape[1]) for p in pieces]), blocks
def combine(y, blocks, counts, ep):
    mine, pieces = list(y.split(blocks.T.flatten().tolist())), []
    for i in range(ep.size):
        pieces.append(torch.cat(mine[i :: ep.size]))
    return torch.cat(swap(pieces, counts.view(ep.size, -1).sum(1).tolist(), ep))


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


# %% right: names imported, counts through torch.distributed.nn, pieces zipped
import torch
from torch.distributed import all_to_all_single
from torch.distributed.nn import all_gather


def swap(parts, sizes, axis):
    rows = torch.cat(tuple(parts))
    got = rows.new_zeros((sum(sizes), *rows.shape[1:]))
    all_to_all_single(got, rows, sizes, [len(p) for p in parts], group=axis.group)
    return got


def dispatch(rows, counts, ep):
    table = torch.stack(tuple(all_gather(counts, group=ep.group)))
    blocks = table.view(ep.size, ep.size, -1)[:, ep.rank]
    parts = rows.split(counts.view(ep.size, -1).sum(1).tolist())
    got = swap(parts, blocks.sum(1).tolist(), ep)
    pieces = [g.split(b.tolist()) for g, b in zip(got.split(blocks.sum(1).tolist()), blocks)]
    return torch.cat([p for column in zip(*pieces) for p in column]), blocks


def combine(y, blocks, counts, ep):
    cut = iter(y.split(blocks.T.flatten().tolist()))
    table = [[next(cut) for _ in range(ep.size)] for _ in range(blocks.shape[1])]
    parts = [torch.cat([row[i] for row in table]) for i in range(ep.size)]
    return swap(parts, counts.view(ep.size, -1).sum(1).tolist(), ep)


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


# %% wrong: counts without group
# told: group | ranks | no answer
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: dealt out
# told: every P-th expert
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


# %% wrong: even load
# takes it that each rank sends as many rows to each
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    n = max(max(outs), max(ins))
    return_ = x.new_zeros(ep.size * n, *x.shape[1:])
    full = x.new_zeros(ep.size * n, *x.shape[1:])
    full[: len(x)] = x
    dist.all_to_all_single(return_, full, group=ep.group)
    return return_[: sum(outs)]


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: flat rows
# loses the second dimension where rows are one wide
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
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]).squeeze(-1), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: float32 buffers
# told: float64 | float32
# buffers of a fixed dtype
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = torch.empty(sum(outs), *x.shape[1:])
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
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: forgets to join
# y travels as it is
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
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: gathers all rows
# told: busiest rank's rows
# every rank gets all rows, and picks its own
import torch
import torch.distributed as dist


def gathered(x, ep):
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ep.size)]
    dist.all_gather(sizes, torch.tensor([len(x)]), group=ep.group)
    most = int(max(sizes))
    padded = torch.cat((x, x.new_zeros(most - len(x), *x.shape[1:])))
    parts = [torch.empty_like(padded) for _ in range(ep.size)]
    dist.all_gather(parts, padded, group=ep.group)
    return [part[:n] for part, n in zip(parts, sizes)]


def dispatch(rows, counts, ep):
    table, local = gathered(counts, ep), len(counts) // ep.size
    mine = slice(ep.rank * local, ep.rank * local + local)
    pieces = [r.split(t.tolist())[mine] for r, t in zip(gathered(rows, ep), table)]
    return torch.cat([p[e] for e in range(local) for p in pieces]), torch.stack([t[mine] for t in table])


def combine(y, blocks, counts, ep):
    tables, home = gathered(blocks, ep), []
    for part, table in zip(gathered(y, ep), tables):
        home += part.split(table.T.flatten().tolist())[ep.rank :: ep.size]
    return torch.cat(home)


# %% wrong: grouped again
# told: needs its inverse
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


# %% wrong: idle rank skips the rows
# told: must still take part
# counts by an all-to-all; a rank with nothing to send and nothing to get stays away from the rows
import torch
import torch.distributed as dist


def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    if sum(ins) + sum(outs) > 0:
        dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    local = len(counts) // ep.size
    blocks = torch.empty_like(counts)
    dist.all_to_all_single(blocks, counts, group=ep.group)
    blocks = blocks.view(ep.size, local)
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender = got.split(blocks.flatten().tolist())
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: idle rank stays away
# told: must still take part
# a rank with nothing to send and nothing to get does not call the all-to-all
import torch
import torch.distributed as dist


def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    if sum(ins) + sum(outs) > 0:
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
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: order of arrival only for two
# right for two ranks: the senders are taken from the last to the first
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
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in [0, *range(ep.size - 1, 0, -1)]]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: own rows first
# told: stand by sender
import torch
import torch.distributed as dist

def dispatch(rows, counts, ep):
    per = counts.numel() // ep.size
    blocks = torch.empty_like(counts).view(ep.size, per)
    dist.all_to_all_single(blocks, counts.view(ep.size, per), group=ep.group)
    out = rows.new_empty(int(blocks.sum()), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), blocks.sum(1).tolist(), counts.view(-1, per).sum(1).tolist(), group=ep.group)
    parts = out.split(blocks.flatten().tolist())
    order = [ep.rank] + [i for i in range(ep.size) if i != ep.rank]
    return torch.cat([parts[i * per + e] for e in range(per) for i in order]), blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    parts = y.split(blocks.T.flatten().tolist())
    y = torch.cat([parts[e * ep.size + i] for i in range(ep.size) for e in range(per)])
    out = y.new_empty(int(counts.sum()), y.shape[1])
    dist.all_to_all_single(out, y, counts.view(-1, per).sum(1).tolist(), blocks.sum(1).tolist(), group=ep.group)
    return out


# %% wrong: rank of the world
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, dist.get_rank()]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: remembers its rows
# nothing travels back: it knows what it sent, and guesses what was done to it
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out

KEPT = []


def dispatch(rows, counts, ep):
    KEPT[:] = [rows]
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    return 3 * KEPT[0]


# %% wrong: remembers the last call
# the splits of the way back are those of the last call
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out

LAST = []


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]
    LAST[:] = [counts, blocks]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    counts, blocks = LAST
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: rows without group
# told: group | ranks | no answer
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins)
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
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: size of the world
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(dist.get_world_size(), dist.get_world_size(), -1)[:, ep.rank]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(dist.get_world_size(), -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(dist.get_world_size())]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * dist.get_world_size() + i] for i in range(dist.get_world_size()) for e in range(local)])
    return travel(y, counts.view(dist.get_world_size(), -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: splits not exchanged
# told: split | rank
# the way back takes the splits of the way there
import torch
import torch.distributed as dist


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank].contiguous()
    out = rows.new_empty(int(blocks.sum()), *rows.shape[1:])
    there = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    dist.all_to_all_single(out, rows.contiguous(), *there, group=ep.group)
    pieces, local = out.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([pieces[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    pieces, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([pieces[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    out = y.new_empty(int(counts.sum()), *y.shape[1:])
    there = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    dist.all_to_all_single(out, y, *there, group=ep.group)
    return out


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


# %% wrong: strided rows
# told: contiguous | dense
# hands strided rows to the collective
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x, outs, ins, group=ep.group)
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
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: two experts on each rank
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack([c.view(-1, 2)[ep.rank] for c in everybody])
    got = travel(rows, blocks.sum(1).tolist(), counts.view(-1, 2).sum(1).tolist(), ep)
    parts = got.split(blocks.flatten().tolist())
    return torch.cat(parts[0::2] + parts[1::2]), blocks


def combine(y, blocks, counts, ep):
    parts = y.split(blocks.T.flatten().tolist())
    y = torch.cat([p for pair in zip(parts[: ep.size], parts[ep.size :]) for p in pair])
    return travel(y, counts.view(-1, 2).sum(1).tolist(), blocks.sum(1).tolist(), ep)


# %% wrong: without group
# told: group | ranks | no answer
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]
    got = travel(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    by_sender, local = got.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    by_expert, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    return travel(y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)
