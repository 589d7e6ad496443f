# told: This is the average
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    return (out + more) / 2, torch.logaddexp(lse, more_lse)
