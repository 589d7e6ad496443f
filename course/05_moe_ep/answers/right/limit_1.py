# topk down the columns, scattered into a mask
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    top = torch.where(map, probs, -1.0).topk(min(capacity, len(map)), dim=0).indices
    kept = torch.zeros_like(map).scatter(0, top, True) & map
    return torch.where(kept, probs, 0.0), kept
