# NumPy, and one row of m, l a query
import numpy as np
import torch


def flash_tiles(memory, s, d, rows, cols):
    for i in range(s // rows):
        q = memory.load("q", i * rows, (i + 1) * rows).numpy() / np.sqrt(d)
        m, l, o = np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, d))
        for j in range(-(-(i + 1) * rows // cols)):
            k, v = (memory.load(name, j * cols, (j + 1) * cols).numpy() for name in ("k", "v"))
            S = np.where(np.arange(j * cols, (j + 1) * cols) <= np.arange(i * rows, (i + 1) * rows)[:, None], q @ k.T, -np.inf)
            new = np.maximum(m, S.max(1))
            p = np.exp(S - new[:, None])
            l, o, m = l * np.exp(m - new) + p.sum(1), o * np.exp(m - new)[:, None] + p @ v, new
        memory.store("out", i * rows, (i + 1) * rows, torch.tensor(o / l[:, None], dtype=torch.float32))
        memory.store("lse", i * rows, (i + 1) * rows, torch.tensor(m + np.log(l), dtype=torch.float32))
