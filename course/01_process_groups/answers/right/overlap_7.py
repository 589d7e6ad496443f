import torch
import torch.distributed as dist
class OverlappedReducer:
    # buckets planned once in reverse order of params; a bucket leaves when all of its params are ready
    def __init__(self, params, bucket_size, group=None):
        self.group, self.plan, now = group, [], []
        for p in reversed(params):
            now.append(p)
            if sum(q.numel() for q in now) >= bucket_size:
                self.plan.append(now)
                now = []
        if now:
            self.plan.append(now)
        self.of = {p: i for i, b in enumerate(self.plan) for p in b}
        self.left, self.work = [len(b) for b in self.plan], {}
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        i = self.of[p]
        self.left[i] -= 1
        if self.left[i] == 0:
            self.start(i)
    def start(self, i):
        flat = torch.cat([p.grad.flatten() for p in self.plan[i]])
        self.work[i] = flat, dist.all_reduce(flat, group=self.group, async_op=True)
    def finish(self):
        for i, (flat, work) in self.work.items():
            work.wait()
            at = 0
            for p in self.plan[i]:
                p.grad.copy_(flat[at : at + p.numel()].view(p.shape))
                at += p.numel()
        self.left, self.work = [len(b) for b in self.plan], {}
