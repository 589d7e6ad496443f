# told: another number than sqrt(d)
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
