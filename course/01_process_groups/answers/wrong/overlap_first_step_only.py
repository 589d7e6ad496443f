# told: first one's sums
import torch
import torch.distributed as dist
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.group, self.buckets, self.of = group, [[]], {}
        for p in reversed(params):
            if sum(q.numel() for q in self.buckets[-1]) >= bucket_size:
                self.buckets.append([])
            self.buckets[-1].append(p)
            self.of[p] = len(self.buckets) - 1
        self.left = [len(b) for b in self.buckets]
        self.sent = {}
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        b = self.of[p]
        self.left[b] -= 1
        if self.left[b] == 0:
            flat = torch.cat([q.grad.reshape(-1) for q in self.buckets[b]])
            self.sent[b] = flat, dist.all_reduce(flat, group=self.group, async_op=True)
    def finish(self):
        for b, (flat, work) in self.sent.items():
            work.wait()
            at = 0
            for q in self.buckets[b]:
                q.grad = flat[at : at + q.numel()].view_as(q).clone()
                at += q.numel()
