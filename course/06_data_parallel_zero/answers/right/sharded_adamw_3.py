import numpy
import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of this rank's part, in numpy arrays."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.decay, self.group, self.t = weights, decay, group, 0
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m, self.v = (numpy.zeros_like(self.own.numpy()) for _ in range(2))

    @torch.no_grad()
    def step(self, grad):
        self.t += 1
        b1, b2 = self.betas
        for a, b in self.decay:
            self.own[a:b] *= 1 - self.lr * self.weight_decay
        g, w = grad.numpy(), self.own.numpy()
        self.m += (1 - b1) * (g - self.m)
        self.v += (1 - b2) * (g * g - self.v)
        w -= self.lr * self.m / (1 - b1**self.t) / (numpy.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)
