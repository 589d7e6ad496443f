# one sigmoid: the share of the second piece
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    w = torch.sigmoid((more_lse - lse).nan_to_num(0.0, posinf=1e9, neginf=-1e9))[..., None]
    return out + w * (more - out), torch.logaddexp(lse, more_lse)
