# told: divided by its own sum
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    return out + more, torch.logaddexp(lse, more_lse)
