from labkit.answers import Edit, Same

_OTHER = "A group has another order: it is its queries, its key, its value."
_EACH = "w.unflatten(0, (groups, -1)) for w in (wq, wk, wv)"
_CUT = "torch.cat(by_group, dim=1).flatten(0, 1).chunk(tp_size)[tp_rank]"

WRONG = [
    Edit(".chunk(tp_size)[tp_rank]", "",
         mistake="This is the whole packed matrix: of tp_size equal blocks a rank holds one."),
    Edit("torch.cat(by_group, dim=1).flatten(0, 1)", "torch.cat([wq, wk, wv])",
         mistake="An equal cut of the stack [Q; K; V] gives rank 0 nothing but queries."),
    Edit("(wq, wk, wv)", "(wq, wv, wk)", mistake=_OTHER),
    Edit("(wq, wk, wv)", "(wk, wq, wv)", mistake=_OTHER),
    Edit("(wq, wk, wv)", "(wk, wv, wq)", mistake=_OTHER),
    Edit(_CUT, "torch.cat([w.tensor_split(tp_size)[tp_rank] for w in (wq, wk, wv)])",
         mistake="The right heads in another order: the packed matrix stores queries, key, value of group 0, then "
                 "those of group 1."),
    Edit("chunk(tp_size)", "tensor_split(tp_size, 1)",
         mistake="You cut the columns: QKV is a column layer, which cuts the rows of the stored weight."),
    Edit("    return", "    mine = max(1, groups // tp_size)\n    return", ("flatten(0, 1).chunk(tp_size)[tp_rank]",
         "split(mine)[tp_rank].flatten(0, 1) if tp_rank * mine < groups else wq[:0]"),
         mistake="With fewer groups than ranks an equal block is a part of a group, whichever rows these are."),
    Edit(_CUT, "torch.cat(by_group, dim=1)[tp_rank::tp_size].flatten(0, 1)",
         mistake="The groups are dealt out to the ranks one by one: a rank holds a block of consecutive rows."),
    Edit(f"[{_EACH}]",
         "[w.unflatten(0, (-1, d)) for w in (wq, wk, wv)]\n    by_group = [w.repeat_interleave(len(by_group[0]) // "
         "len(w), 0) for w in by_group]",
         mistake="A group has one key and one value, whatever the number of its queries; yours have one for each "
                 "query."),
    Edit(f"[{_EACH}]", f"[{_EACH}]\n    by_group[0] = wq.unflatten(0, (-1, groups, d)).transpose(0, 1).flatten(1, 2)",
         mistake="A group has n consecutive query heads, the first group heads 0 to n-1; yours are dealt out to the "
                 "groups."),
    Edit("wk.shape[0] // d", "wk.shape[0]"),
    Edit("chunk(tp_size)[tp_rank]", "unflatten(0, (-1, tp_size))[:, tp_rank]"),
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
