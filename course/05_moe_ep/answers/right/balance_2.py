# the softmax's Jacobian, written out
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    f = torch.bincount(logits.argsort(-1)[:, -k:].flatten(), minlength=E).to(logits) / (k * T)
    g = coeff * E * f / T
    J = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return (p @ g).sum().item(), torch.einsum('tij,j->ti', J, g)
