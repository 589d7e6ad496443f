# told: Only the bias's gradient
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(x, weight), tp)
    return y if bias is None else y + bias.detach() + 0 * bias
