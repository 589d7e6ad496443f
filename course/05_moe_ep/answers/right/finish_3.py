# in terms of means: over edp, times edp/dp, by the mean count
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def finish(dense, expert, tokens, dp, edp):
    mean = all_reduce(torch.tensor(tokens / dp.size), dp)
    d = all_reduce(dense / dp.size, dp) / mean
    e = all_reduce(expert / edp.size, edp) * (edp.size / dp.size) / mean
    return d, e
