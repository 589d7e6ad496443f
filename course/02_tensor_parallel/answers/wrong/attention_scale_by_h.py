# told: another number than sqrt(d)
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
            (q @ k.transpose(-1, -2) / math.sqrt(x.shape[-1])).masked_fill(
                torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf
            ),
            -1,
        ),
        v,
    )
    return row_linear(out.permute(2, 0, 1, 3).reshape(s, b, -1), *proj, tp)
