# futures copy the sums back as they arrive; finish() waits for the futures
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.waiting, self.futures = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.waiting.append(p)
        if sum(q.grad.numel() for q in self.waiting) >= self.size:
            self.leave()

    def leave(self):
        params, self.waiting = self.waiting, []
        flat = torch.cat([p.grad.reshape(-1) for p in params])

        def back(_):
            at = 0
            for p in params:
                p.grad.copy_(flat[at : at + p.numel()].view(p.shape))
                at += p.numel()

        self.futures.append(dist.all_reduce(flat, group=self.group, async_op=True).get_future().then(back))

    def finish(self):
        if self.waiting:
            self.leave()
        while self.futures:
            self.futures.pop(0).wait()
