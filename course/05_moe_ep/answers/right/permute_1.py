# pair by pair
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def permute(tokens, probs, map):
    pairs = [(t, e) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]]
    source = torch.tensor([t for t, _ in pairs], dtype=torch.int64)
    return tokens[source], torch.stack([probs[t, e] for t, e in pairs]), source
def unpermute(rows, source, tokens):
    return torch.stack([rows[source == t].sum(0) for t in range(tokens)])
