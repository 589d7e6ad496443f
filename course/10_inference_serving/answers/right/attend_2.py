# rows of the pages seen as one long list, torch's own attention
import torch
import torch.nn.functional as F


def attend(q, k, v, keys, values, table, kept):
    n, size, total = len(q), keys.shape[1], kept + len(q)
    j = torch.arange(total)
    rows = torch.tensor(table)[j // size] * size + j % size
    flat_k, flat_v = keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])
    flat_k.index_copy_(0, rows[kept:], k)
    flat_v.index_copy_(0, rows[kept:], v)
    seen = torch.ones(n, total, dtype=torch.bool).tril(kept)
    return F.scaled_dot_product_attention(q[None], flat_k[rows][None], flat_v[rows][None], attn_mask=seen)[0]
