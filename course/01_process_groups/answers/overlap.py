from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "p.grad.copy_(part.view_as(p))",
        "p.grad.copy_(part.view_as(p) / dist.get_world_size())",
        mistake="Sum, do not average. The divisor comes in section 6.",
    ),
    Edit(">= self.bucket_size", ">= 10**9", told="has not left when"),
    Edit(">= self.bucket_size", ">= 1", told="buckets need"),
    Edit(
        """        if self.open:
            self.send()
        for""",
        "        for",
        mistake="The last bucket is never sent: it is not full, so no hook sends it.",
    ),
    # all at the end
    Edit(
        """        if sum(q.numel() for q in self.open) >= self.bucket_size:
            self.send()
""",
        "",
        told="bucket is full",
    ),
    # blocks in the hook
    Edit(
        "self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))",
        """dist.all_reduce(flat, group=self.group)
        self.travelling.append((self.open, flat))""",
        (
            """for params, flat, handle in self.travelling:
            handle.wait()""",
            "for params, flat in self.travelling:",
        ),
        told="inside backward()",
    ),
    # counts parameters
    Edit("sum(q.numel() for q in self.open) >= self.bucket_size", "len(self.open) >= 2", mistake="The bucket that finish() sends is summed over all ranks; asked are those in `group`."),
    # equal sizes only
    Edit("split([p.numel() for p in params]), strict=True", "chunk(len(params))", told="shape"),
    # every gradient by itself
    Edit(
        "sum(q.numel() for q in self.open) >= self.bucket_size", "sum(q.numel() for q in self.open) >= 1", mistake="The bucket that finish() sends is summed over all ranks; asked are those in `group`."
    ),
    # flat buffer of float32
    Edit("flatten() for", "flatten().float() for", told="float64"),
    # hard coded size
    Edit("sum(q.numel() for q in self.open)", "16 * len(self.open)", mistake="The last bucket is never sent: it is not full, so no hook sends it."),
    # ignores the group
    Edit("group=self.group", "group=None", mistake="You sum over all ranks; asked are those in `group`."),
    # ignores the group in finish
    Edit(
        """self.send()

    def send(self) -> None:""",
        """self.send(self.group)
    def send(self, group=None):""",
        ("group=self.group", "group=group"),
        mistake="You sum over all ranks; asked are those in `group`.",
    ),
    # last bucket stays
    Edit(
        """        if self.open:
            self.send()
""",
        "",
        told="last bucket",
    ),
    # more than bucket size
    Edit(
        "sum(q.numel() for q in self.open) >= self", "sum(q.numel() for q in self.open) > self", told="bucket is full"
    ),
    # no open bucket left
    Edit(
        """if self.open:
            self.send()""",
        "self.send()",
        told="RuntimeError | list of Tensors",
    ),
    # polls in the hook
    Edit(
        "self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))",
        """self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        while not self.travelling[-1][2].is_completed():
            pass""",
        told="inside backward()",
    ),
    # sums instead of replacing
    Edit("p.grad.copy_(part.view_as(p))", "p.grad.add_(part.view_as(p))", mistake="The sum was added to the rank's own gradient. It replaces it."),
    # waits for a future in the hook
    Edit(
        "self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))",
        """self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        self.travelling[-1][2].get_future().wait()""",
        told="inside backward()",
    ),
    # waits for the bucket before
    Edit(
        "self.open = []",
        """self.open = []
        if len(self.travelling) > 1:
            self.travelling[-2][2].wait()""",
        told="inside backward()",
    ),
]

EQUIVALENT = [
    Same("line 32: `self.travelling = []` dropped", "old sums are copied first, the new ones over them"),
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


# %% right: buckets planned at the beginning, last parameters first
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


# %% wrong: copies before it waits
# mistake: Every gradient is still this rank's own: finish() never waits for its all_reduce, or no sum is copied back.
import torch
import torch.distributed as dist
class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group = bucket_size, group
        self.open, self.count, self.works = [], 0, []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        self.open.append(p)
        self.count += p.numel()
        if self.count >= self.size:
            self.send()
    def send(self):
        if not self.open:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.open])
        self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))
        for p, piece in zip(self.open, flat.split([p.numel() for p in self.open])):
            p.grad.copy_(piece.view_as(p))
        self.open, self.count = [], 0
    def finish(self):
        self.send()
        for work in self.works:
            work.wait()
        self.works = []


# %% wrong: first step only
# mistake: The second step ends with the first one's sums: something of the first step is still there after finish().
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


# %% wrong: all in the last hook
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


# %% wrong: hook before the gradient is there
# told: before the gradient is stored
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.gone = bucket_size, group, [], []
        for p in params:
            p.register_hook(lambda grad, p=p: self.ready(p))

    def ready(self, p):
        self.open.append(p)
        if sum(q.numel() for q in self.open) >= self.size:
            self.leave()

    def leave(self):
        flat = torch.cat([p.grad.flatten() for p in self.open])
        self.gone.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        self.open = []

    def finish(self):
        if self.open:
            self.leave()
        for params, flat, work in self.gone:
            work.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.gone = []


