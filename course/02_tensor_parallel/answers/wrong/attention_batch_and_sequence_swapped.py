# told: different sequences
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
