# functional collectives, which are waited for where they are read
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.group = group if group is not None else dist.group.WORLD
        self.limit, self.bucket, self.sums = bucket_size, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(lambda q: self.ready(q))
    def ready(self, p):
        self.bucket.append(p)
        if sum(map(torch.numel, self.bucket)) >= self.limit:
            self.leave()
    def leave(self):
        with torch.no_grad():
            flat = torch.nn.utils.parameters_to_vector(p.grad for p in self.bucket)
            self.sums.append((self.bucket, fc.all_reduce(flat, "sum", self.group)))
        self.bucket = []
    def finish(self):
        if self.bucket:
            self.leave()
        for params, flat in self.sums:
            flat = fc.wait_tensor(flat)
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad = part.reshape(p.shape).clone()
        self.sums.clear()
