# told: before the gradient is stored
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.gone = bucket_size, group, [], []
        for p in params:
            p.register_hook(lambda grad, p=p: self.ready(p))

    def ready(self, p):
        self.open.append(p)
        if sum(q.numel() for q in self.open) >= self.size:
            self.leave()

    def leave(self):
        flat = torch.cat([p.grad.flatten() for p in self.open])
        self.gone.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        self.open = []

    def finish(self):
        if self.open:
            self.leave()
        for params, flat, work in self.gone:
            work.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.gone = []
