# one message for all of dp, functional collectives
import torch
from torch.distributed._functional_collectives import all_reduce


def finish(dense, expert, tokens, dp, edp):
    flat = torch.cat((dense.double(), torch.tensor([tokens], dtype=torch.float64)))
    if dp.size > 1:
        flat = all_reduce(flat, "sum", dp.group) + 0
    e = all_reduce(expert, "sum", edp.group) + 0 if edp.size > 1 else expert
    return (flat[:-1] / flat[-1]).to(dense.dtype), e / flat[-1].to(e.dtype)
