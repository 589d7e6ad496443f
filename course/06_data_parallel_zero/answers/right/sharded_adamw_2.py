import torch
import torch.distributed as dist


class ShardedAdamW:
    """torch's AdamW over views."""
    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.group = weights, group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.mine = weights.detach().chunk(ranks)[rank]
        cuts = sorted({0, len(self.mine), *(x for pair in decay for x in pair)})
        self.spans = [(a, b) for a, b in zip(cuts, cuts[1:]) if a < b]
        self.params = [torch.nn.Parameter(self.mine[a:b]) for a, b in self.spans]
        groups = [{"params": [p], "weight_decay": weight_decay if any(a <= s[0] and s[1] <= b for a, b in decay) else 0.0}
                  for p, s in zip(self.params, self.spans)]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=False)

    @torch.no_grad()
    def step(self, grad):
        for p, (a, b) in zip(self.params, self.spans):
            p.grad = grad[a:b]
        self.optimizer.step()
        for p in self.params: p.grad = None
        dist.all_gather_into_tensor(self.weights, self.mine.clone(), group=self.group)
