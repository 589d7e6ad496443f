# told: predicted | room
# dense, from one load of everything
import torch


def flash_tiles(memory, s, d, rows, cols):
    q, k, v = (memory.load(name, 0, s) for name in "qkv")
    S = (q @ k.T / d**0.5).masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
    memory.store("out", 0, s, S.softmax(1) @ v)
    memory.store("lse", 0, s, S.logsumexp(1))
