# told: first to come
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    kept = map & (map.cumsum(0) <= capacity)
    return probs * kept, kept
