# names imported one by one; the count by an object, as a Python number
import torch
from torch.distributed import ReduceOp, all_reduce
def rank_loss(losses, mask, group=None):
    work = all_reduce(n := mask.sum().reshape(1).double(), ReduceOp.SUM, group, True)
    mine = (losses * mask).sum()
    work.wait()
    return mine / max(float(n), 1.0)
