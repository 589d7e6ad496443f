# in numpy, row numbers first
import numpy as np
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    q, k, v = (np.asarray(w).reshape(wk.shape[0] // d, -1, w.shape[1]) for w in (wq, wk, wv))
    packed = np.concatenate([q, k, v], axis=1).reshape(-1, wq.shape[1])
    return torch.from_numpy(np.ascontiguousarray(np.split(packed, tp_size)[tp_rank]))
