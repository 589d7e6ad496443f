# one group after the other, one sequence after the other
import torch
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def attention(x, qkv, proj, d, queries_per_group, tp):
    packed, n = F.linear(copy_to_region(x, tp), *qkv), queries_per_group
    rows = []
    for sequence in packed.unbind(1):
        heads = []
        for group in sequence.split((n + 2) * d, -1):
            *queries, k, v = group.split(d, -1)
            heads += [F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0] for q in queries]
        rows.append(torch.cat(heads, -1))
    return reduce_from_region(torch.stack(rows, 1) @ proj[0].t(), tp) + proj[1]
