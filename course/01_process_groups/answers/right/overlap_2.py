# names imported one by one, a deque, gradients as views of the flat tensor
from collections import deque
from torch import cat
from torch.distributed import all_reduce
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.full, self.bucket, self.count = bucket_size, group, deque(), [], 0
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        self.bucket += [p]
        self.count += p.numel()
        if not self.count < self.size:
            self.close()
    def close(self):
        flat = cat([p.grad.view(-1) for p in self.bucket])
        self.full.append((all_reduce(flat, async_op=True, group=self.group), flat, self.bucket))
        self.bucket, self.count = [], 0
    def finish(self):
        if self.bucket:
            self.close()
        while self.full:
            work, flat, params = self.full.popleft()
            work.wait()
            at = 0
            for p in params:
                p.grad = flat[at : at + p.numel()].view(p.shape)
                at += p.numel()
