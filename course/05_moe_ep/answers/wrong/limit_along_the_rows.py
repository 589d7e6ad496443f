# told: down the columns
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    top = probs.topk(min(capacity, probs.shape[1]), dim=1).indices
    kept = torch.zeros_like(map).scatter(1, top, True) & map
    return probs * kept, kept
