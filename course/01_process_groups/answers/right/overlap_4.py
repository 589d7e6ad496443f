# futures: asked for in the hook, waited for in finish; gradients of a parameter by its hook on AccumulateGrad
import torch
import torch.distributed as dist
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.params, self.bucket_size, self.group = list(params), bucket_size, group
        self.begin()
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda _, i=i: self.ready(i))
    def begin(self):
        self.waiting, self.futures = {}, []
    def ready(self, i):
        self.waiting[i] = self.params[i].grad
        if sum(g.numel() for g in self.waiting.values()) >= self.bucket_size:
            self.start()
    def start(self):
        flat = torch.cat([g.ravel() for g in self.waiting.values()])
        future = dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True).get_future()
        self.futures.append((list(self.waiting), flat, future))
        self.waiting = {}
    def finish(self):
        if self.waiting:
            self.start()
        for which, flat, future in self.futures:
            future.wait()
            torch.nn.utils.vector_to_parameters(flat, [self.params[i].grad for i in which])
        self.begin()
