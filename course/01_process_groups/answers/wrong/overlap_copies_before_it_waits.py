# told: never waits for its all_reduce
import torch
import torch.distributed as dist
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group = bucket_size, group
        self.open, self.count, self.works = [], 0, []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        self.open.append(p)
        self.count += p.numel()
        if self.count >= self.size:
            self.send()
    def send(self):
        if not self.open:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.open])
        self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))
        for p, piece in zip(self.open, flat.split([p.numel() for p in self.open])):
            p.grad.copy_(piece.view_as(p))
        self.open, self.count = [], 0
    def finish(self):
        self.send()
        for work in self.works:
            work.wait()
        self.works = []
