# told: not written
import math
import torch


def attend(q, k, v, keys, values, table, kept):
    total = kept + len(q)
    all_k, all_v = keys[table].flatten(0, 1), values[table].flatten(0, 1)
    all_k[kept:total], all_v[kept:total] = k, v
    hidden = torch.arange(total) > torch.arange(kept, total)[:, None]
    scores = (q @ all_k[:total].T / math.sqrt(q.shape[1])).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ all_v[:total]
