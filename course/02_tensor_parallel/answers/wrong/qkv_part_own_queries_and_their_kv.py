# told: part of a group
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    n = wq.shape[0] // d // tp_size
    heads = range(tp_rank * n, (tp_rank + 1) * n)
    kv = sorted({i // per for i in heads})
    q = torch.cat([wq[i * d : (i + 1) * d] for i in heads])
    out = []
    for i in kv:
        out += [wq[j * d : (j + 1) * d] for j in heads if j // per == i] + [
            wk[i * d : (i + 1) * d],
            wv[i * d : (i + 1) * d],
        ]
    return torch.cat(out)
