# einops by hand: rows appended group by group
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups, rows = wk.shape[0] // d, []
    for q, k, v in zip(wq.tensor_split(groups), wk.tensor_split(groups), wv.tensor_split(groups)):
        rows.extend([*q, *k, *v])
    size = len(rows) // tp_size
    return torch.stack(rows[tp_rank * size : (tp_rank + 1) * size])
