# told: the moments of all weights
import numpy
import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of all weights, in bytearrays: the gradient is gathered, and every rank updates everything."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.lr, self.betas, self.eps, self.group, self.t = weights, lr, betas, eps, group, 0
        ranks = dist.get_world_size(group)
        ends, every = torch.zeros(4, dtype=torch.int32), torch.zeros(4 * ranks, dtype=torch.int32)
        for i, (a, b) in enumerate(decay):
            ends[2 * i], ends[2 * i + 1] = a, b
        dist.all_gather_into_tensor(every, ends, group=group)
        part = len(weights) // ranks
        of_ranks = enumerate(every.view(ranks, 2, 2).tolist())
        self.shrink = [(r * part + a, r * part + b) for r, spans in of_ranks for a, b in spans]
        self.kept = 1 - lr * weight_decay
        self.m, self.v = bytearray(weights.nbytes), bytearray(weights.nbytes)

    @torch.no_grad()
    def step(self, grad):
        whole = torch.empty_like(self.weights)
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.group)
        g, w, (b1, b2) = whole.numpy(), self.weights.numpy(), self.betas
        self.t += 1
        for a, b in self.shrink:
            w[a:b] *= self.kept
        m, v = (numpy.frombuffer(moments, g.dtype) for moments in (self.m, self.v))
        m += (1 - b1) * (g - m)
        v += (1 - b2) * (g * g - v)
        w -= self.lr * m / (1 - b1**self.t) / (numpy.sqrt(v / (1 - b2**self.t)) + self.eps)
