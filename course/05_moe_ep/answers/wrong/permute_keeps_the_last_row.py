# told: keeps the last
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def permute(tokens, probs, map):
    expert, source = map.T.nonzero(as_tuple=True)
    return tokens[source], probs[source, expert], source
def unpermute(rows, source, tokens):
    out = rows.new_zeros(tokens, rows.shape[1])
    out[source] = rows
    return out
