# told: bucket is full
import torch
import torch.distributed as dist
class OverlappedReducer:
    # a bucket never grows beyond bucket_size: it leaves before the parameter that does not fit
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group = bucket_size, group
        self.open, self.count, self.flying = [], 0, []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        if self.count + p.numel() > self.size:
            self.send()
        self.open.append(p)
        self.count += p.numel()
    def send(self):
        if not self.open:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.open])
        self.flying.append((dist.all_reduce(flat, group=self.group, async_op=True), flat, self.open))
        self.open, self.count = [], 0
    def finish(self):
        self.send()
        for work, flat, params in self.flying:
            work.wait()
            for p, piece in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(piece.view_as(p))
        self.flying = []
