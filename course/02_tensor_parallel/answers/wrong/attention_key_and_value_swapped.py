# told: changed places
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x, qkv, proj, d, queries_per_group, tp):
    packed = column_linear(x, *qkv, tp).unflatten(-1, (-1, queries_per_group + 2, d))
    q, v, k = packed.split([queries_per_group, 1, 1], dim=3)
    q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries_per_group > 1)
    return row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)
