# torch.distributed.nn
import torch
import torch.distributed.nn.functional as dnn


def gather_sequence(x, tp):
    return torch.cat(dnn.all_gather(x.contiguous(), group=tp.group))


def reduce_scatter_sequence(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    return dnn.reduce_scatter(out, [part.contiguous() for part in x.chunk(tp.size)], group=tp.group)
