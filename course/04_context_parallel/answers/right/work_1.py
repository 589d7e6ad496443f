# chunk sums, folded for zigzag
import torch
def work(s, cp, zigzag):
    chunks = torch.arange(1, s + 1).view(cp * (1 + zigzag), -1).sum(1).tolist()
    return [chunks[r] + chunks[-1 - r] if zigzag else chunks[r] for r in range(cp)]
