# scores by einsum, softmax by hand
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
