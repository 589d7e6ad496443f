# expert by expert
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    kept = torch.zeros_like(map)
    for e in range(map.shape[1]):
        mine = [t for t in range(len(map)) if map[t, e]]
        for t in sorted(mine, key=lambda t: -float(probs[t, e]))[:capacity]:
            kept[t, e] = True
    return probs * kept, kept
