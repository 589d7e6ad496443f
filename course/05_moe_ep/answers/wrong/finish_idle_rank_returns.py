# told: takes part, too
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    if tokens == 0:
        return dense, expert
    n = all_reduce(torch.tensor(float(tokens)), dp)
    return all_reduce(dense, dp) / n, all_reduce(expert, edp) / n
