from labkit.answers import Edit, Same

_ANY = "with one query a group, enable_gqa changes nothing"
_BACK = "out.permute(2, 0, 1, 3).flatten(2)"
_IMPORT = "from exercises.row_linear import row_linear\n"
_COLLECTIVES = _IMPORT + "from minimegatron.comm.collectives import *\n"

WRONG = [
    Edit("is_causal=True", "is_causal=False",
         mistake="Each token sees the tokens behind it, too. It may see only itself and what came before it."),
    Edit("column_linear(x, *qkv, tp)", "F.linear(x, *qkv)", mistake="dx is only the share of this rank's heads."),
    Edit(f"row_linear({_BACK}, *proj, tp)", f"F.linear({_BACK}, *proj)",
         mistake="y is only the share of this rank's heads."),
    Edit("column_linear(x,", "column_linear(copy_to_region(x, tp),", (_IMPORT, _COLLECTIVES),
         mistake="dx is summed once too often: `column_linear` sums it already."),
    Edit(f"row_linear({_BACK}, *proj, tp)",
         f"reduce_from_region(F.linear({_BACK}, *proj), tp)", (_IMPORT, _COLLECTIVES),
         mistake="Every rank added the output bias before the sum."),
    Edit("return row", "return x + row",
         mistake="You added x itself. The residual stands outside of attention, in the layer."),
    Edit("is_causal=True", "is_causal=True, scale=1.0", mistake="Your scores are not divided by sqrt(d)."),
    Edit("is_causal=True", "is_causal=True, scale=x.shape[-1] ** -0.5",
         mistake="Your scores are divided by another number than sqrt(d), where d is the width of one head."),
    Edit("q, k, v = packed", "q, v, k = packed",
         mistake="Keys and values have changed places: a group is its queries, its key, its value."),
    Edit("    out = F", "    k, v = (t.repeat(1, queries_per_group, 1, 1) for t in (k, v))\n    out = F",
         (", enable_gqa=queries_per_group > 1", ""),
         mistake="Query heads 0 .. n-1 use group 0, the next n group 1: repeat_interleave, not repeat."),
    Edit("packed.split([queries_per_group, 1, 1], dim=3)",
         "packed.flatten(2, 3).split([g * queries_per_group, g, g], dim=2)",
         ("    q, k, v = packed", "    g = packed.shape[2]\n    q, k, v = packed"), ("part.flatten(2, 3)", "part"),
         mistake="You cut the packed features as a stack [Q; K; V]. They are packed group by group: the queries of a "
                 "group, its key, its value."),
    Edit(_BACK, "out.reshape(*x.shape[:2], -1)",
         mistake="The heads' results are right, and reshaped from [b, heads, s, d] as they lie; the dims must first be "
                 "put back in the order s, b, heads, d."),
    Edit(".unflatten(-1, (-1,", ".reshape(*x.shape[1::-1], -1).unflatten(-1, (-1,", ("permute(1, 2, 0, 3)",
         "transpose(1, 2)"), (_BACK, "out.transpose(1, 2).reshape(*x.shape[:2], -1)"),
         mistake="Tokens of different sequences see each other: dim 0 of x is the token, dim 1 the sequence."),
    Edit("queries_per_group > 1", "queries_per_group > 2", told="RuntimeError"),
    Edit(_BACK, "out.permute(2, 0, 3, 1).flatten(2)", told="is wrong"),
    Edit("*proj, tp", "proj[0], proj[1] * tp.size, tp"),
    Edit(_BACK, f"scatter_to_region(gather_from_region({_BACK}, tp), tp)", (_IMPORT, _COLLECTIVES),
         told="allowed here: all_reduce"),
]

RIGHT = [
    Edit("= packed.split([queries_per_group, 1, 1], dim=3)",
         "= (packed[:, :, :, at] for at in (slice(-2), slice(-2, -1), slice(-1, None)))", ("queries_per_group > 1",
         "True")),
]

EQUIVALENT = [
    Same("line 12: 0 for 1", _ANY),
    Same("line 12: `>=` for `>`", _ANY),
]


# %% right: the formula, with f by hand
import torch
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region
def attention(x, qkv, proj, d, queries_per_group, tp):
    n = queries_per_group
    s, b, h = x.shape
    packed = F.linear(copy_to_region(x, tp), *qkv).view(s, b, -1, n + 2, d)
    q, k, v = packed[..., :n, :], packed[..., n, :], packed[..., n + 1, :]
    scores = torch.einsum('sbgnd,tbgd->bgnst', q, k) * d**-0.5
    scores = scores + torch.full((s, s), float('-inf')).triu(1)
    out = torch.einsum('bgnst,tbgd->sbgnd', scores.softmax(-1), v).reshape(s, b, -1)
    return reduce_from_region(F.linear(out, proj[0]), tp) + proj[1]


# %% right: one group after the other, the keys not repeated
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear
def attention(x, qkv, proj, d, queries_per_group, tp):
    n, outs = queries_per_group, []
    packed = column_linear(x, qkv[0], qkv[1], tp).transpose(0, 1)
    for group in packed.split((n + 2) * d, dim=-1):
        heads = group.unflatten(-1, (n + 2, d)).transpose(1, 2)
        q, k, v = heads[:, :n], heads[:, n : n + 1].expand(-1, n, -1, -1), heads[:, n + 1 :].expand(-1, n, -1, -1)
        outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    return row_linear(torch.cat(outs, -1).transpose(0, 1), proj[0], proj[1], tp)
