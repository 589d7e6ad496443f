# one matrix: its product permutes, its transpose brings back
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def permute(tokens, probs, map):
    source = torch.arange(len(map)).expand(map.shape[1], -1)[map.T]
    one = F.one_hot(source, len(map)).to(tokens.dtype)
    return one @ tokens, probs.T[map.T], source
def unpermute(rows, source, tokens):
    return F.one_hot(source, tokens).to(rows.dtype).T @ rows
