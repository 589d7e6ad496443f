from labkit.answers import Edit, Same

WRONG = [
    Edit("torch.cat(by_group, dim=1).flatten(0, 1)", "torch.cat([wq, wk, wv])", mistake="An equal cut of the stack [Q; K; V] gives rank 0 nothing but queries."),
    Edit("for w in (wq, wk, wv)", "for w in (wk, wq, wv)", told="View wq as"),
    # heads of one row
    Edit("groups = wk.shape[0] // d", "groups = wk.shape[0]"),
    # key and value swapped
    Edit("wq, wk, wv", "wq, wv, wk", mistake="Keys and values have changed places: a group is queries, key, value."),
    # rows dealt out
    Edit("flatten(0, 1).chunk(tp_size)[tp_rank]", "flatten(0, 1)[tp_rank::tp_size]"),
]

EQUIVALENT = [
    Same("line 6: rounded up for down", "a matrix has whole heads: d divides its rows"),
]


# %% right: group by group in a loop
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = len(wk) // d
    n = len(wq) // d // g
    rows = []
    for i in range(g):
        rows += [wq[i * n * d : (i + 1) * n * d], wk[i * d : (i + 1) * d], wv[i * d : (i + 1) * d]]
    packed = torch.cat(rows)
    size = len(packed) // tp_size
    return packed[tp_rank * size : (tp_rank + 1) * size]


# %% right: chunks of the three matrices, zipped
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = len(wk) // d
    packed = torch.cat([torch.cat(p) for p in zip(wq.chunk(g), wk.chunk(g), wv.chunk(g))])
    return packed.view(tp_size, -1, packed.shape[1])[tp_rank]


# %% right: in numpy, row numbers first
import numpy as np
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    q, k, v = (np.asarray(w).reshape(wk.shape[0] // d, -1, w.shape[1]) for w in (wq, wk, wv))
    packed = np.concatenate([q, k, v], axis=1).reshape(-1, wq.shape[1])
    return torch.from_numpy(np.ascontiguousarray(np.split(packed, tp_size)[tp_rank]))


# %% right: einops by hand: rows appended group by group
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups, rows = wk.shape[0] // d, []
    for q, k, v in zip(wq.tensor_split(groups), wk.tensor_split(groups), wv.tensor_split(groups)):
        rows.extend([*q, *k, *v])
    size = len(rows) // tp_size
    return torch.stack(rows[tp_rank * size : (tp_rank + 1) * size])


# %% wrong: cuts columns
# mistake: You cut the columns: QKV is a column layer, which cuts the rows of the stored weight.
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    packed = torch.cat([wq.view(g, per, d, -1), wk.view(g, 1, d, -1), wv.view(g, 1, d, -1)], 1).reshape(-1, wq.shape[1])
    return packed.chunk(tp_size, 1)[tp_rank]


# %% wrong: cuts each matrix alone
# mistake: The right heads in another order: the packed matrix stores queries, key, value of group 0, then those of group 1.
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    return torch.cat([w.chunk(tp_size)[tp_rank] for w in (wq, wk, wv)])


# %% wrong: groups dealt out
# mistake: The groups are dealt out to the ranks one by one: a rank holds a block of consecutive rows.
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    packed = torch.cat([wq.view(g, per, d, -1), wk.view(g, 1, d, -1), wv.view(g, 1, d, -1)], 1)
    return packed[tp_rank::tp_size].reshape(-1, wq.shape[1])


# %% wrong: k for every query
# mistake: A group has one key and one value, whatever the number of its queries; yours have one for each query.
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    k = wk.view(g, 1, d, -1).expand(g, per, d, -1)
    v = wv.view(g, 1, d, -1).expand(g, per, d, -1)
    packed = torch.stack([wq.view(g, per, d, -1), k, v], 2).reshape(-1, wq.shape[1])
    return packed.chunk(tp_size)[tp_rank]


# %% wrong: needs whole groups
# mistake: With fewer groups than ranks an equal block is a part of a group, whichever rows these are.
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups = wk.shape[0] // d
    mine = max(1, groups // tp_size)
    n = wq.shape[0] // groups
    rows = []
    for g in range(tp_rank * mine, min(groups, (tp_rank + 1) * mine)):
        rows += [wq[g * n : (g + 1) * n], wk[g * d : (g + 1) * d], wv[g * d : (g + 1) * d]]
    return torch.cat(rows) if rows else wq[:0]


# %% wrong: queries dealt to groups
# mistake: A group has n consecutive query heads, the first group heads 0 to n-1; yours are dealt out to the groups.
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups = wk.shape[0] // d
    q, k, v = (w.unflatten(0, (-1, d)) for w in (wq, wk, wv))
    by_group = [torch.cat([q[g::groups], k[g : g + 1], v[g : g + 1]]) for g in range(groups)]
    return torch.cat(by_group).flatten(0, 1).chunk(tp_size)[tp_rank]


# %% wrong: rows interleaved
# mistake: The d rows of a head lie together; yours are taken one by one from the heads of the group.
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    packed = torch.cat([wq.view(g, d, per, -1).transpose(1, 2), wk.view(g, 1, d, -1), wv.view(g, 1, d, -1)], 1).reshape(
        -1, wq.shape[1]
    )
    return packed.chunk(tp_size)[tp_rank]
