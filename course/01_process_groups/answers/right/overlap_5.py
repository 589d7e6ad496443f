# it looks in the hook which buckets have arrived, without waiting, and copies those back at once
import torch
import torch.distributed as dist
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.away = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        self.open.append(p)
        if sum(q.numel() for q in self.open) >= self.size:
            self.send()
        self.home(w for w in list(self.away) if w[2].is_completed())
    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.open])
        self.away.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        self.open = []
    def home(self, which):
        for work in which:
            params, flat, handle = work
            handle.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
            self.away.pop(next(i for i, w in enumerate(self.away) if w is work))
    def finish(self):
        if self.open:
            self.send()
        self.home(list(self.away))
