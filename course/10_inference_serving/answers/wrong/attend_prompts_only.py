# told: kept before are not looked at
import math
import torch


def attend(q, k, v, keys, values, table, kept):
    size = keys.shape[1]
    for i in range(len(q)):
        keys[table[(kept + i) // size], (kept + i) % size] = k[i]
        values[table[(kept + i) // size], (kept + i) % size] = v[i]
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    return (q @ k.T / math.sqrt(q.shape[1])).masked_fill(hidden, -math.inf).softmax(-1) @ v
