# a log-sum-exp of the ranks' log-sum-exps
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, target, tp):
        n = z.shape[-1]
        mine = z.logsumexp(-1)
        all_of = c.all_gather(mine[None], tp)
        lse = all_of.logsumexp(0)
        hot = F.one_hot(target, n * tp.size)[..., tp.rank * n : (tp.rank + 1) * n].to(z.dtype)
        at = c.all_reduce((z * hot).sum(-1), tp)
        ctx.save_for_backward((z - lse.unsqueeze(-1)).exp() - hot)
        return lse - at
    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g.unsqueeze(-1), None, None
def cross_entropy(logits, target, tp): return Loss.apply(logits, target, tp)
