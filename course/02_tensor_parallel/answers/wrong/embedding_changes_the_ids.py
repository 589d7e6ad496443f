# told: 
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def embedding(ids, weight, tp):
    ids -= tp.rank * weight.shape[0]
    foreign = (ids < 0) | (ids >= weight.shape[0])
    rows = F.embedding(ids.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduce_from_region(rows, tp)
