# told: once too often
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    local = ids - tp.rank * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduce_from_region(copy_to_region(rows, tp), tp)
