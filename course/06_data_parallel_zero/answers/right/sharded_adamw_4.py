import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of this rank's part, in lists of numbers."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.decay, self.group, self.t = weights, decay, group, 0
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m = self.v = [0.0] * len(self.own)

    @torch.no_grad()
    def step(self, grad):
        self.t += 1
        b1, b2 = self.betas
        for a, b in self.decay:
            self.own[a:b] *= 1 - self.lr * self.weight_decay
        g = grad.tolist()
        self.m = [b1 * m + (1 - b1) * x for m, x in zip(self.m, g)]
        self.v = [b2 * v + (1 - b2) * x * x for v, x in zip(self.v, g)]
        c1, c2 = 1 - b1**self.t, 1 - b2**self.t
        moves = [self.lr * m / c1 / ((v / c2) ** 0.5 + self.eps) for m, v in zip(self.m, self.v)]
        self.own -= torch.tensor(moves, dtype=self.own.dtype)
        dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)
