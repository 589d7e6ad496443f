# told: gradient of the table is not
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def embedding(ids, weight, tp):
    local = ids - tp.rank * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight, padding_idx=0).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduce_from_region(rows, tp)
