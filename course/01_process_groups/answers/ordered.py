from labkit.answers import Edit

_REST = "        for bucket in self.buckets[len(self.travelling) :]:\n            self.send(bucket)\n        for"
_SUM = "p.grad = part.view_as(p)"
_ZEROS = "(torch.zeros_like(p) if p.grad is None else p.grad)"
_RESET = "                p.grad = part.view_as(p)\n        self.arrived, self.travelling = set(), []\n"
_TURN = "            if not self.arrived.issuperset(bucket):\n                break\n            self.send(bucket)\n"
_ERROR = "RuntimeError | deadlock | wrong | has returned"

WRONG = [
    Edit(_SUM, "pass", mistake="Every gradient is still this rank's own: no sum is copied back."),
    Edit(_SUM, f"{_SUM} / dist.get_world_size(self.group)",
         mistake="Sum, do not average. The divisor comes in section 6."),
    Edit("group=self.group", "group=None", told="with a group smaller than the world"),
    Edit(_SUM, "p.grad = part.view_as(p) + (0 if p.grad is None else p.grad)",
         mistake="The sum was added to the rank's own gradient. It replaces it."),
    Edit(_SUM, f"if p.grad is not None:\n                    {_SUM}",
         mistake="A parameter without a gradient on this rank has none after finish(). It gets the sum of the others."),
    Edit(_RESET, _RESET.replace("self.arrived, self.travelling = set(), []", "self.travelling = []"),
         mistake="In the second step all parameters count as ready from the beginning, and zeros leave."),
    Edit(_ZEROS, "p.grad", told="took no part in the loss"),
    Edit("reversed(params)", "params", told="its buckets need | has not left"),
    Edit(_TURN, "            break\n", told="has not left"),
    Edit(">= bucket_size", "> bucket_size", told="its buckets need | has not left"),
    Edit("sum(q.numel() for q in self.buckets[-1]) >= bucket_size", "self.buckets[-1]", told="its buckets need"),
    Edit(_REST, "        for", ("strict=True):\n            handle", "strict=False):\n            handle"), told=_ERROR),
    Edit("async_op=True)))", "async_op=True)))\n        self.travelling[-1][1].wait()", told="inside backward()"),
    Edit(").flatten() for", ").flatten().float() for", told="with inputs of float64"),
    # buckets without any gradient are left out: other ranks have one
    Edit(_REST, "        for bucket in self.buckets[len(self.travelling) :]:\n"
         "            if self.arrived.intersection(bucket):\n                self.send(bucket)\n        for",
         ("strict=True):\n            handle", "strict=False):\n            handle"), told=_ERROR),
]


# %% right: as in DDP: counters, the number of the bucket whose turn it is, flat buffers that stay
import torch
import torch.distributed as dist

class OrderedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.group, self.where, self.buckets, now = group, {}, [], []
        for p in list(params)[::-1]:
            now.append(p)
            if sum(q.numel() for q in now) >= bucket_size:
                self.buckets.append(now)
                now = []
        if now:
            self.buckets.append(now)
        for b, bucket in enumerate(self.buckets):
            for p in bucket:
                self.where[id(p)] = b
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
        self.flats = [torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype) for bucket in self.buckets]
        self.begin()

    def begin(self):
        self.left, self.turn, self.works = [len(bucket) for bucket in self.buckets], 0, []

    def ready(self, p):
        self.left[self.where[id(p)]] -= 1
        while self.turn < len(self.left) and self.left[self.turn] == 0:
            self.launch()

    def launch(self):
        flat, at = self.flats[self.turn], 0
        for p in self.buckets[self.turn]:
            flat[at : at + p.numel()] = 0 if p.grad is None else p.grad.reshape(-1)
            at += p.numel()
        self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))
        self.turn += 1

    def finish(self):
        while self.turn < len(self.buckets):
            self.launch()
        for work, flat, bucket in zip(self.works, self.flats, self.buckets):
            work.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.clone().view(p.shape)
        self.begin()


# %% right: by numbers of parameters; missing gradients are made zeros first, and then count as ready
import torch
import torch.distributed as dist

class OrderedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.params, self.size, self.group = list(params), bucket_size, group
        self.there, self.next, self.sent = set(), len(self.params), []
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda _, i=i: self.ready(i))

    def ready(self, i):
        self.there.add(i)
        while self.next > 0:
            low, held = self.next, 0
            while low > 0 and held < self.size:
                low -= 1
                held += self.params[low].numel()
            if not set(range(low, self.next)) <= self.there:
                return
            these = self.params[low : self.next]
            flat = torch.nn.utils.parameters_to_vector([p.grad for p in these])
            self.sent.append((these, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
            self.next = low

    def finish(self):
        for i, p in enumerate(self.params):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
                self.ready(i)
        for these, flat, work in self.sent:
            work.wait()
            torch.nn.utils.vector_to_parameters(flat, [p.grad for p in these])
        self.there, self.next, self.sent = set(), len(self.params), []


# %% right: futures, and a generator that yields one bucket after the other
import torch
import torch.distributed as dist

class OrderedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.buckets, held = [[]], 0
        for p in reversed(list(params)):
            if held >= bucket_size:
                self.buckets.append([])
                held = 0
            self.buckets[-1] += [p]
            held += p.numel()
            p.register_post_accumulate_grad_hook(self.ready)
        self.group, self.got, self.futures, self.coming = group, [], [], iter(self.buckets)
        self.now = next(self.coming)

    def start(self):
        flat = torch.cat([p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in self.now])
        self.futures.append(dist.all_reduce(flat.detach(), group=self.group, async_op=True).get_future())
        self.now = next(self.coming, None)

    def ready(self, p):
        self.got.append(id(p))
        while self.now and all(id(q) in self.got for q in self.now):
            self.start()

    def finish(self):
        while self.now:
            self.start()
        for bucket, future in zip(self.buckets, self.futures):
            flat = future.wait()[0]
            for p in bucket:
                p.grad, flat = flat[: p.numel()].view_as(p).clone(), flat[p.numel() :]
        self.got, self.futures, self.coming = [], [], iter(self.buckets)
        self.now = next(self.coming)


# %% wrong: by arrival, as in OverlappedReducer
# told: rank 0: got [[tensor([21.0]), tensor([12.0])]]
import torch
import torch.distributed as dist

class OrderedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.params, self.size, self.group, self.open, self.sent = list(params), bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.open.append(p)
        if sum(q.numel() for q in self.open) >= self.size:
            self.send()

    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.open])
        self.sent.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        self.open = []

    def finish(self):
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
                self.open.append(p)
        if self.open:
            self.send()
        for params, flat, handle in self.sent:
            handle.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.sent = []


# %% wrong: the same buckets on all ranks, each sent when it is complete
# told: rank 0: got [[tensor([21.0]), tensor([12.0])]]
import torch
import torch.distributed as dist

class OrderedReducer:
    def __init__(self, params, bucket_size, group=None):
        self.group, self.buckets = group, [[]]
        for p in reversed(params):
            if sum(q.numel() for q in self.buckets[-1]) >= bucket_size:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.ready)
        self.got, self.sent = set(), {}

    def ready(self, p):
        self.got.add(p)
        for i, bucket in enumerate(self.buckets):
            if i not in self.sent and self.got.issuperset(bucket):
                self.send(i)

    def send(self, i):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.buckets[i]])
        self.sent[i] = flat, dist.all_reduce(flat, group=self.group, async_op=True)

    def finish(self):
        for i in range(len(self.buckets)):
            if i not in self.sent:
                self.send(i)
        for i, (flat, handle) in self.sent.items():
            handle.wait()
            for p, part in zip(self.buckets[i], flat.split([p.numel() for p in self.buckets[i]])):
                p.grad = part.view_as(p).clone()
        self.got, self.sent = set(), {}
