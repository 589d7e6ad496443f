from labkit.answers import Edit, Same

_ANY = "with one query a group, enable_gqa changes nothing"

WRONG = [
    Edit("is_causal=True", "is_causal=False", mistake="Each token sees the tokens behind it, too. It may see only itself and what came before it."),
    Edit("enable_gqa=queries_per_group > 1", "enable_gqa=queries_per_group > 2", told="RuntimeError"),
    Edit(
        "    out = F",
        """    k, v = (t.repeat(1, queries_per_group, 1, 1) for t in (k, v))
    out = F""",
        (", enable_gqa=queries_per_group > 1", ""),
        mistake="Query heads 0 .. n-1 use group 0, the next n group 1: repeat_interleave, not repeat.",
    ),
    Edit("is_causal=True", "is_causal=True, scale=1.0", mistake="Your scores are not divided by sqrt(d)."),
    Edit("column_linear(x, *qkv, tp)", "F.linear(x, *qkv)", mistake="dx is only the share of this rank's heads."),
    Edit(
        "row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)",
        "row_linear(out.permute(2, 0, 1, 3).flatten(2), proj[0], proj[1] * tp.size, tp)",
    ),
    Edit("out.permute(2, 0, 1, 3).flatten(2)", "out.permute(2, 0, 3, 1).flatten(2)", told="back to"),
    # gathers the heads
    Edit(
        "from exercises.row_linear import row_linear",
        """from exercises.row_linear import row_linear
from minimegatron.comm.collectives import gather_from_region, scatter_to_region""",
        (
            "return row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)",
            """out = out.permute(2, 0, 1, 3).flatten(2)
    return row_linear(scatter_to_region(gather_from_region(out, tp), tp), *proj, tp)""",
        ),
    ),
]

RIGHT = [
    Edit(
        "q, k, v = packed.split([queries_per_group, 1, 1], dim=3)",
        """n = queries_per_group
    q, k, v = packed[:, :, :, :n], packed[:, :, :, n : n + 1], packed[:, :, :, n + 1 :]""",
        ("queries_per_group > 1", "True"),
    ),
]

EQUIVALENT = [
    Same("line 12: 0 for 1", _ANY),
    Same("line 12: `>=` for `>`", _ANY),
]


# %% right: the formula, with f by hand
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def attention(x, qkv, proj, d, queries_per_group, tp):
    n = queries_per_group
    s, b, h = x.shape
    packed = F.linear(copy_to_region(x, tp), *qkv).view(s, b, -1, n + 2, d)
    q, k, v = packed[..., :n, :], packed[..., n, :], packed[..., n + 1, :]
    scores = torch.einsum('sbgnd,tbgd->bgnst', q, k) * d**-0.5
    scores = scores + torch.full((s, s), float('-inf')).triu(1)
    out = torch.einsum('bgnst,tbgd->sbgnd', scores.softmax(-1), v).reshape(s, b, -1)
    return reduce_from_region(F.linear(out, proj[0]), tp) + proj[1]


# %% right: scores by einsum, softmax by hand
import math

import torch
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    n = queries_per_group
    packed = column_linear(x, *qkv, tp).view(s, b, -1, n + 2, d)
    q, k, v = packed[..., :n, :], packed[..., n, :], packed[..., n + 1, :]
    scores = torch.einsum("ibgnd,jbgd->bgnij", q, k) / math.sqrt(d)
    later = torch.ones(s, s, dtype=torch.bool).triu(1)
    p = scores.masked_fill(later, float("-inf")).softmax(-1)
    return row_linear(torch.einsum("bgnij,jbgd->ibgnd", p, v).flatten(2), *proj, tp)


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


# %% right: one head after the other
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    outs = []
    for block in y.split(d * (p + 2), -1):
        heads = block.split(d, -1)
        for q in heads[:p]:
            q, k, v = (z.transpose(0, 1) for z in (q, heads[p], heads[p + 1]))
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return row_linear(torch.cat(outs, -1), *proj, tp)


# %% wrong: adds the residual
# mistake: You added x itself. The residual stands outside of attention, in the layer.
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    g = y.shape[-1] // (d * (p + 2))
    y = y.view(s, b, g, p + 2, d)
    q, k, v = y.split([p, 1, 1], 3)
    q, k, v = (z.permute(1, 2, 3, 0, 4).reshape(b, -1, s, d) for z in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + row_linear(out.permute(2, 0, 1, 3).reshape(s, b, -1), *proj, tp)


# %% wrong: as wide as x
# mistake: Your scores are divided by another number than sqrt(d), where d is the width of one head.
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    n = queries_per_group
    packed = column_linear(x, *qkv, tp).unflatten(-1, (-1, n + 2, d))
    q, k, v = packed.split([n, 1, 1], dim=3)
    q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n > 1, scale=x.shape[-1] ** -0.5)
    return row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)


# %% wrong: attends over heads
# mistake: The heads of a token attend to each other: dim -2 of what SDPA gets is the token.
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    g = y.shape[-1] // (d * (p + 2))
    y = y.view(s, b, g, p + 2, d)
    q, k, v = y.split([p, 1, 1], 3)
    q, k, v = (z.reshape(s, b, -1, d) for z in (q, k, v))
    k, v = k.repeat_interleave(p, 2), v.repeat_interleave(p, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=False)
    return row_linear(out.reshape(s, b, -1), *proj, tp)


# %% wrong: batch and sequence swapped
# mistake: Tokens of different sequences see each other: dim 0 of x is the token, dim 1 the sequence.
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    n = queries_per_group
    packed = column_linear(x, *qkv, tp).reshape(b, s, -1, n + 2, d)
    q, k, v = packed.split([n, 1, 1], dim=3)
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n > 1)
    return row_linear(out.transpose(1, 2).reshape(s, b, -1), *proj, tp)


# %% wrong: heads not put back
# mistake: The heads' results are right, and reshaped from [b, heads, s, d] as they lie; the dims must first be put back in the order s, b, heads, d.
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    g = y.shape[-1] // (d * (p + 2))
    y = y.view(s, b, g, p + 2, d)
    q, k, v = y.split([p, 1, 1], 3)
    q, k, v = (z.permute(1, 2, 3, 0, 4).reshape(b, -1, s, d) for z in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return row_linear(out.reshape(s, b, -1), *proj, tp)


# %% wrong: key and value swapped
# mistake: Keys and values have changed places: a group is its queries, its key, its value.
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    packed = column_linear(x, *qkv, tp).unflatten(-1, (-1, queries_per_group + 2, d))
    q, v, k = packed.split([queries_per_group, 1, 1], dim=3)
    q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries_per_group > 1)
    return row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)


# %% wrong: mask upside down
# mistake: Your mask is upside down: each token sees itself and what comes behind it.
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    g = y.shape[-1] // (d * (p + 2))
    y = y.view(s, b, g, p + 2, d)
    q, k, v = y.split([p, 1, 1], 3)
    q, k, v = (z.permute(1, 2, 3, 0, 4).reshape(b, -1, s, d) for z in (q, k, v))
    k, v = k.repeat_interleave(p, 1), v.repeat_interleave(p, 1)
    out = torch.matmul(
        torch.softmax(
            (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(
                torch.ones(s, s, dtype=torch.bool).tril(-1), -math.inf
            ),
            -1,
        ),
        v,
    )
    return row_linear(out.permute(2, 0, 1, 3).reshape(s, b, -1), *proj, tp)


# %% wrong: no g
# mistake: y is only the share of this rank's heads.
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    g = y.shape[-1] // (d * (p + 2))
    y = y.view(s, b, g, p + 2, d)
    q, k, v = y.split([p, 1, 1], 3)
    q, k, v = (z.permute(1, 2, 3, 0, 4).reshape(b, -1, s, d) for z in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(out.permute(2, 0, 1, 3).reshape(s, b, -1), *proj)


# %% wrong: softmax over queries
# mistake: Your softmax runs over the queries: the weights that one query gives to the keys must add up to 1.
import math
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    s, b, _ = x.shape
    p = queries_per_group
    y = column_linear(x, *qkv, tp)
    g = y.shape[-1] // (d * (p + 2))
    y = y.view(s, b, g, p + 2, d)
    q, k, v = y.split([p, 1, 1], 3)
    q, k, v = (z.permute(1, 2, 3, 0, 4).reshape(b, -1, s, d) for z in (q, k, v))
    k, v = k.repeat_interleave(p, 1), v.repeat_interleave(p, 1)
    out = torch.matmul(
        torch.softmax(
            (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf),
            -2,
        ),
        v,
    )
    return row_linear(out.permute(2, 0, 1, 3).reshape(s, b, -1), *proj, tp)


# %% wrong: split as a stack
# mistake: You cut the packed features as a stack [Q; K; V]. They are packed group by group: the queries of a group, its key, its value.
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    packed = column_linear(x, *qkv, tp).unflatten(-1, (-1, d))
    groups = packed.shape[2] // (queries_per_group + 2)
    q, k, v = packed.split([groups * queries_per_group, groups, groups], dim=2)
    q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries_per_group > 1)
    return row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)


# %% wrong: of one sequence
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    n = queries_per_group
    packed = column_linear(x, *qkv, tp)[:, 0].unflatten(-1, (-1, n + 2, d))
    q, k, v = packed.split([n, 1, 1], dim=2)
    q, k, v = (part.flatten(1, 2).transpose(0, 1)[None] for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n > 1)
    out = out[0].transpose(0, 1).flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return row_linear(out, *proj, tp)


