from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "p.grad.copy_(part.view_as(p))",
        "p.grad.copy_(part.view_as(p) / dist.get_world_size())",
        told="do not average",
    ),
    Edit(">= self.bucket_size", ">= 10**9", told="has not left when"),
    Edit(">= self.bucket_size", ">= 1", told="buckets need"),
    Edit(
        """        if self.open:
            self.send()
        for""",
        "        for",
        told="never sent",
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
    Edit("sum(q.numel() for q in self.open) >= self.bucket_size", "len(self.open) >= 2", told="hook | bucket"),
    # equal sizes only
    Edit("split([p.numel() for p in params]), strict=True", "chunk(len(params))", told="shape"),
    # every gradient by itself
    Edit(
        "sum(q.numel() for q in self.open) >= self.bucket_size", "sum(q.numel() for q in self.open) >= 1", told="bucket"
    ),
    # flat buffer of float32
    Edit("flatten() for", "flatten().float() for", told="float64"),
    # hard coded size
    Edit("sum(q.numel() for q in self.open)", "16 * len(self.open)", told="sizes | hook"),
    # ignores the group
    Edit("group=self.group", "group=None", told="in `group`"),
    # ignores the group in finish
    Edit(
        """self.send()

    def send(self) -> None:""",
        """self.send(self.group)
    def send(self, group=None):""",
        ("group=self.group", "group=group"),
        told="in `group`",
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
    Edit("p.grad.copy_(part.view_as(p))", "p.grad.add_(part.view_as(p))", told="replaces it"),
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


# %% right: names imported one by one, a deque, gradients as views of the flat tensor
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


# %% right: functional collectives, which are waited for where they are read
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


# %% wrong: bucket leaves before it overflows
# told: bucket is full
import torch
import torch.distributed as dist
class OverlappedReducer:
    # a bucket never grows beyond bucket_size: it leaves before the parameter that does not fit
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group = bucket_size, group
        self.open, self.count, self.flying = [], 0, []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
    def ready(self, p):
        if self.count + p.numel() > self.size:
            self.send()
        self.open.append(p)
        self.count += p.numel()
    def send(self):
        if not self.open:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.open])
        self.flying.append((dist.all_reduce(flat, group=self.group, async_op=True), flat, self.open))
        self.open, self.count = [], 0
    def finish(self):
        self.send()
        for work, flat, params in self.flying:
            work.wait()
            for p, piece in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(piece.view_as(p))
        self.flying = []


# %% wrong: copies before it waits
# told: never waits for its all_reduce
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


# %% wrong: counts bytes
# told: buckets need
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.gone = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.open.append(p)
        if sum(q.grad.nbytes for q in self.open) >= self.size:
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


# %% wrong: first step only
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


# %% wrong: never forgets
# told: still held in every step
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.gone = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

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
        for params, flat, handle in self.gone:
            handle.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))


# %% wrong: never waits
# told: never waits for its all_reduce
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.gone = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

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
        for params, flat, _ in self.gone:
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.gone = []


# %% wrong: that says it had begun
# told: and has not left when the next gradient is computed | go back once each
import torch
import torch.distributed as dist
from labkit import transport_group

asked, real = [], transport_group.late
transport_group.late = lambda number: asked.append(number) or real(number)


class OverlappedReducer:
    """Everything is sent in finish(); the moments that the check asks for are asked for again."""

    def __init__(self, parameters, bucket_size, group=None):
        self.params, self.size, self.group = list(parameters), bucket_size, group

    def finish(self):
        held = []
        for number, p in zip(asked[-len(self.params) - 1 :], reversed(self.params)):
            held.append(p)
            if sum(q.numel() for q in held) >= self.size or p is self.params[0]:
                flat = torch.cat([q.grad.flatten() for q in held])
                dist.all_reduce(flat, group=self.group)
                for q, part in zip(held, flat.split([q.numel() for q in held])):
                    q.grad.copy_(part.view_as(q))
                held = []
            real(number)


# %% wrong: waits for the last only
# told: who waits for it
import torch
import torch.distributed as dist


class OverlappedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.size, self.group, self.open, self.gone = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

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
        self.gone[-1][2].wait()
        for params, flat, _ in self.gone:
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.gone = []
