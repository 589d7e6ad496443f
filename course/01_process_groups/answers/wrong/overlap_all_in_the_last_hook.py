# told: bucket is full
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.params, self.bucket_size, self.group, self.seen, self.travelling = params, bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.seen.append(p)
        if len(self.seen) == len(self.params):
            bucket = []
            for q in self.seen:
                bucket.append(q)
                if sum(x.numel() for x in bucket) >= self.bucket_size or q is p:
                    flat = torch.cat([x.grad.flatten() for x in bucket])
                    self.travelling.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
                    bucket = []

    def finish(self):
        for params, flat, handle in self.travelling:
            handle.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.travelling, self.seen = [], []
