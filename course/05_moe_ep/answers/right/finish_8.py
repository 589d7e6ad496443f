import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    """Divide first by the mean number of tokens, then average."""
    n = all_reduce(torch.tensor([tokens], dtype=torch.float64), dp)
    mean = n / dp.size
    dense = all_reduce(dense / dp.size, dp)
    expert = all_reduce(expert / dp.size, edp)
    return (dense / mean).to(dense.dtype), (expert / mean).to(expert.dtype)
