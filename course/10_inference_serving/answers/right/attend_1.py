# row by row, one query after the other
import math
import torch


def attend(q, k, v, keys, values, table, kept):
    size, out = keys.shape[1], []
    for i in range(len(q)):
        j = kept + i
        keys[table[j // size]][j % size] = k[i]
        values[table[j // size]][j % size] = v[i]
        seen = [(table[t // size], t % size) for t in range(j + 1)]
        scores = torch.stack([q[i] @ keys[page, row] for page, row in seen]) / math.sqrt(q.shape[1])
        weights = torch.exp(scores - scores.max())
        total = sum(w * values[page, row] for w, (page, row) in zip(weights, seen))
        out.append(total / weights.sum())
    return torch.stack(out)
