from labkit.answers import Edit

_SUM = "p.grad.copy_(part.view_as(p))"
_START = "self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))"
_FULL = "sum(q.numel() for q in self.open) >= self.bucket_size"
_LAST = "        if self.open:\n            self.send()\n        for"
_GROUP = "The ranks in `group` take part in each sum, all of them and no others."
_UNSENT = "The last bucket is never sent: it is not full, so no hook sends it."
_AVERAGE = "Sum, do not average. The divisor comes in section 6."

WRONG = [
    Edit(_SUM, _SUM.replace("(p))", "(p) / dist.get_world_size())"), mistake=_AVERAGE),
    Edit(_SUM, _SUM.replace("(p))", "(p) / dist.get_world_size(self.group))"), mistake=_AVERAGE),
    Edit("group=self.group", "group=None", mistake=_GROUP),
    Edit(_SUM, _SUM.replace("copy_", "add_"), mistake="The sum was added to the rank's own gradient. It replaces it."),
    Edit(_LAST, "        for", told="is never sent | 'NoneType' object has no attribute 'flatten'",  # as the next step begins
         mistake=_UNSENT),
    Edit(_LAST, "        for", ("p.grad.flatten()", "p.grad.reshape(-1)"), mistake=_UNSENT),
    Edit(_LAST, "        for", ("p.grad.flatten()", "p.grad.view(-1)"), mistake=_UNSENT),
    Edit(_SUM, "pass",
         mistake="Every gradient is still this rank's own: no sum is copied back, or it is copied before it has "
                 "arrived."),
    Edit("hook(self.ready)", "hook(lambda p: self.ready(p))", ("self.travelling = []\n",
         "self.ready = self.send = lambda *_: None\n"),
         mistake="The second step ends with the first one's sums: something of the first step is still there after "
                 "finish()."),
    Edit(_LAST, _LAST.replace("send()", "send(None)"), ("def send(self)", "def send(self, *group)"),
         ("group=self.group", "group=[*group, self.group][0]"),
         mistake=_GROUP),
    Edit("        self.travelling = []\n", "", told="are still held in every step"),
    Edit(f"        if {_FULL}:\n            self.send()\n", "", told="bucket is full"),
    Edit(_FULL, "self.open", told="buckets need"),
    Edit("q.numel() for", "1 for", ("self.bucket_size:", "2:"), told="bucket is full | buckets need"),
    Edit("q.numel() for", "16 for", told="bucket is full | buckets need"),
    Edit(">= self.bucket_size", "> self.bucket_size", told="bucket is full | buckets need"),
    Edit(_LAST, "        self.send()\n        for", told="non-empty list"),
    Edit("split([p.numel() for p in params]), strict=True", "chunk(len(params))", told="shape"),
    Edit("flatten() for", "flatten().float() for", told="with inputs of float64"),
    Edit("register_post_accumulate_grad_hook(self.ready)", "register_hook(lambda grad, p=p: self.ready(p))",
         told="before `.grad` is stored"),
    # it waits in the hook, in three ways
    Edit(_START, _START + "\n        self.travelling[-1][2].get_future().wait()", told="inside backward()"),
    Edit(_START, _START + "\n        while not self.travelling[-1][2].is_completed():\n            pass",
         told="inside backward()"),
    Edit("self.open = []\n",
         "self.open = []\n        if self.travelling[1:]:\n            self.travelling[-2][2].wait()\n",
         told="inside backward()"),
]


# %% right: the layout is known beforehand: reverse order, a flat buffer, counters
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
        sent, self.sent = self.sent, {}
        self.left = [len(b) for b in self.buckets]
        for b, (flat, work) in sent.items():
            work.wait()
            at = 0
            for q in self.buckets[b]:
                q.grad = flat[at : at + q.numel()].view_as(q).clone()
                at += q.numel()


# %% right: futures: asked for in the hook, waited for in finish; gradients of a parameter by its hook on AccumulateGrad
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


# %% right: futures copy the sums back as they arrive; finish() waits for the futures
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
