from labkit.answers import Edit, Same

_REORDERED = "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])"
_ORDER_BACK = "torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])"
_SPLITS = "blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()"

WRONG = [
    Edit(_REORDERED, "out", (_ORDER_BACK, "y"),
         mistake="The rows arrive by sender, and are left so. An expert wants its own in one piece."),
    Edit(_REORDERED, "out",
         mistake="`dispatch` leaves the rows by sender, and `combine` takes them for grouped by expert. An "
         "expert wants its own in one piece."),
    Edit(_ORDER_BACK, "y",
         mistake="`y` is sorted by expert; before it travels its blocks must be back in the order in which "
         "they came, by sender."),
    Edit("y.split(blocks.T.flatten()", "y.split(blocks.flatten()",
         (_ORDER_BACK, _REORDERED.replace("sender", "expert")),
         mistake="`combine` does the step of `dispatch` once more: it moves rows to where they stood before that step "
         "only by chance. The way back needs its inverse."),
    Edit("blocks.contiguous()", "blocks.T.contiguous()", ("    by_expert", "    blocks = blocks.T\n    by_expert"),
         mistake="blocks[i, e]: the rows that rank i sends to expert e of this rank, [P, E/P]."),
    # the way back is turned round as if P = E/P
    Edit(_ORDER_BACK, "torch.cat([by_expert[e * local + i] for i in range(local) for e in range(ep.size)])"),
    # stays away when it has and gets nothing
    Edit(f"    splits = {_SPLITS}",
         f"    if not len(rows) and not len(out):\n        return out, blocks\n    splits = {_SPLITS}",
         told="takes part"),
    Edit(f"splits = {_SPLITS}", f"splits = ({_SPLITS})[::-1]", told="The splits do not fit the rows"),
    Edit("group=ep.group", "group=None", told="a group smaller than the world"),
    Edit("[:, ep.rank]", "[:, dist.get_rank()]", told="a group smaller than the world"),
    Edit("rows.contiguous(), *splits", "rows, *splits", told="Tensors must be contiguous"),
    # all rows to all ranks
    Edit("    by_sender = out",
         "    dist.all_gather_object([None] * ep.size, rows, group=ep.group)\n    by_sender = out",
         told="the busiest rank's rows"),
]

EQUIVALENT = [Same("line 15: `.contiguous()` dropped", "a view holds the same numbers")]


# %% wrong: all blocks are padded to the largest of all ranks
# told: the busiest rank's rows
import torch
import torch.distributed as dist

def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    every = torch.stack(everybody).view(ep.size, ep.size, -1)
    blocks = every[:, ep.rank].contiguous()
    padded = rows.new_zeros(ep.size, int(every.sum(-1).max()), rows.shape[1])
    for i, part in enumerate(rows.split(counts.view(ep.size, -1).sum(1).tolist())):
        padded[i, : len(part)] = part
    got = torch.empty_like(padded)
    dist.all_to_all_single(got, padded, group=ep.group)
    cut = [one[: int(block.sum())].split(block.tolist()) for one, block in zip(got, blocks)]
    return torch.cat([cut[i][e] for e in range(blocks.shape[1]) for i in range(ep.size)]), blocks

def combine(y, blocks, counts, ep):
    local = blocks.shape[1]
    by_expert = y.split(blocks.T.flatten().tolist())
    by_sender = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    out = y.new_empty(int(counts.sum()), y.shape[1])
    splits = counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist()
    dist.all_to_all_single(out, by_sender, *splits, group=ep.group)
    return out


# %% right: counts by an all-to-all of their own, rows in one index
import torch
import torch.distributed as dist

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
