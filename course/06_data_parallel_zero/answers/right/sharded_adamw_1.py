import torch
import torch.distributed as dist


class ShardedAdamW:
    def __init__(
        self, weights: torch.Tensor, decay: list[tuple[int, int]], lr: float, weight_decay: float,
        betas: tuple[float, float], eps: float, group: dist.ProcessGroup | None = None,
    ):
        """weights [n], n divides by the number of ranks of `group`."""
        self.weights, self.decay, self.lr, self.weight_decay = weights, decay, lr, weight_decay
        self.betas, self.eps, self.group, self.t = betas, eps, group, 0
        self.mine = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m = torch.zeros_like(self.mine)
        self.v = torch.zeros_like(self.mine)

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> None:
        """grad: of this rank's part. Afterwards `weights` is new everywhere, on every rank."""
        self.t += 1
        b1, b2 = self.betas
        for a, b in self.decay:
            self.mine[a:b] *= 1 - self.lr * self.weight_decay
        self.m.mul_(b1).add_(grad, alpha=1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        self.mine -= self.lr * (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        dist.all_gather_into_tensor(self.weights, self.mine, group=self.group)
