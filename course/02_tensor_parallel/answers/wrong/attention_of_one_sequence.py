# told: 
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
