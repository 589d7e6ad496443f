from labkit.answers import Edit, Same

_SCATTER = "dist.reduce_scatter_tensor(self.shards[n], whole, group=self.group, async_op=True)"
_ALL_REDUCED = """dist.all_reduce(whole, group=self.group, async_op=True)
        self.shards[n] = whole.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]"""
_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"

WRONG = [
    Edit(_SCATTER, _ALL_REDUCED.replace("dist.all_reduce", "dist.all_reduce"), told="calls all_reduce"),
    Edit("async_op=True)\n", "async_op=True)\n        work.wait()\n", told="as soon as that has left"),
    Edit("if len(self.travelling) > 1:", "if False:", told="holds"),
    Edit("        p.grad = None\n", "", mistake="The parameters still have their whole gradients: once it lies in its bucket, a gradient is let " "go."),
    Edit("        if self.missing[n] == 0:\n            self.send(n)\n", "", told="has not left when"),
    Edit("if self.missing[n] == 0", "if self.missing[n] == 0 and n + 1 < len(self.buckets)"),
    Edit("return shards", "return [s / dist.get_world_size(self.group) for s in shards]", mistake="Sum, do not average: who divides comes later."),
    Edit("group=self.group, async_op", "async_op"),
    Edit("        work.wait()\n", "", told="never waits for its reduce_scatter"),
    # gradients stay on their parameters until a bucket is full
    Edit(
        "        self.open(n)[at : at + p.numel()] = p.grad.flatten()\n        p.grad = None\n",
        "        self.kept.setdefault(n, []).append((at, p))\n",
        (
            "        whole = self.open(n)\n",
            "        whole = self.open(n)\n        for at, p in self.kept.pop(n, []):\n"
            "            whole[at : at + p.numel()] = p.grad.flatten()\n            p.grad = None\n",
        ),
        ("        self.begin()\n\n", "        self.kept = {}\n        self.begin()\n\n"),
        told="holds",
    ),
    Edit("        self.begin()\n        return shards", "        return shards"),
    Edit(
        "            if n not in self.shards:\n                self.send(n)\n",
        "            if n not in self.shards and n in self.whole:\n                self.send(n)\n",
    ),
    Edit("        del self.whole[n]\n", "", told="holds"),
    Edit("[at : at + p.numel()] = p.grad", "[: p.numel()] = p.grad"),
    Edit("self.example.new_zeros", "torch.zeros"),
    Edit("p.grad.flatten()", "p.grad.view(-1)"),
    Edit("dist.get_world_size(self.group)", "dist.get_world_size()"),
    Edit("if self.missing[n] == 0:", "if all(m == 0 for m in self.missing):", told="has not left when"),
]

RIGHT = [
    # waits for the one before, then sends
    Edit(
        "        whole = self.open(n)\n",
        "        if self.travelling:\n            self.let_go()\n        whole = self.open(n)\n",
        ("        if len(self.travelling) > 1:\n            self.let_go()\n", ""),
    ),
    # lists of tensors
    Edit(
        _SCATTER,
        "dist.reduce_scatter(self.shards[n], list(whole.chunk(dist.get_world_size(self.group))), "
        "group=self.group, async_op=True)",
    ),
    Edit("[at : at + p.numel()] = p.grad.flatten()", "[at : at + p.numel()].view(p.shape).copy_(p.grad)"),
]

EQUIVALENT = [
    Same("line 13: -1 for 0", "every parameter has the dtype of the others"),
    Same("line 13: 1 for 0", "every parameter has the dtype of the others"),
    Same("line 40: rounded up for down", _WHOLE),
]


# %% right: waits when the next bucket leaves; reset
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            p = self.params[0]
            self.filling[n] = torch.zeros(b - a, dtype=p.dtype, device=p.device)
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if self.missing[n] == 0:
            self.send(n)

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter_tensor(shard, buffer, group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n, missing in enumerate(self.missing):
            if missing:
                self.send(n)
        self.land()
        shards = [self.shards[n] for n in range(len(self.buckets))]
        self.reset()
        return shards


# %% right: buckets leave in their order
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}
        self.next = 0

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            p = self.params[0]
            self.filling[n] = torch.zeros(b - a, dtype=p.dtype, device=p.device)
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        while self.next < len(self.buckets) and self.missing[self.next] == 0:
            self.send(self.next); self.next += 1

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter_tensor(shard, buffer, group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n in range(self.next, len(self.buckets)):
            self.send(n)
        self.land()
        shards = [self.shards[n] for n in range(len(self.buckets))]
        self.reset()
        return shards


# %% right: reduce_scatter with a list of parts
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            p = self.params[0]
            self.filling[n] = torch.zeros(b - a, dtype=p.dtype, device=p.device)
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if self.missing[n] == 0:
            self.send(n)

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter(shard, list(buffer.chunk(self.ranks)), group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n, missing in enumerate(self.missing):
            if missing:
                self.send(n)
        self.land()
        shards = [self.shards[n] for n in range(len(self.buckets))]
        self.reset()
        return shards


# %% wrong: leaves an empty bucket out
# mistake: A bucket none of whose parameters has a gradient is reduced as well: its shard is zeros.
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            p = self.params[0]
            self.filling[n] = torch.zeros(b - a, dtype=p.dtype, device=p.device)
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if self.missing[n] == 0:
            self.send(n)

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter_tensor(shard, buffer, group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n, missing in enumerate(self.missing):
            if missing and n in self.filling:
                self.send(n)
        self.land()
        shards = [self.shards[n] for n in range(len(self.buckets)) if n in self.shards]
        self.reset()
        return shards


# %% wrong: shards as they left
# mistake: A bucket that was not full came last. The shards stand in the order of the buckets, whenever they left.
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            p = self.params[0]
            self.filling[n] = torch.zeros(b - a, dtype=p.dtype, device=p.device)
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if self.missing[n] == 0:
            self.send(n)

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter_tensor(shard, buffer, group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n, missing in enumerate(self.missing):
            if missing:
                self.send(n)
        self.land()
        shards = list(self.shards.values())
        self.reset()
        return shards


# %% wrong: full with its lowest index
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            p = self.params[0]
            self.filling[n] = torch.zeros(b - a, dtype=p.dtype, device=p.device)
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if i == min(j for j, m in enumerate(self.of) if m == n):
            self.send(n)

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter_tensor(shard, buffer, group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n, missing in enumerate(self.missing):
            if missing:
                self.send(n)
        self.land()
        shards = [self.shards[n] for n in range(len(self.buckets))]
        self.reset()
        return shards


# %% wrong: whole gradient in numpy
# told: bytes after the call
from functools import partial

import numpy
import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        self.whole = numpy.zeros(buckets[-1][1], params[0].detach().numpy().dtype)
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(partial(self.hook, i))

    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling = {}
        self.flying = None
        self.shards = {}

    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            self.whole[a:b] = 0
            self.filling[n] = torch.from_numpy(self.whole[a:b])
        return self.filling[n]

    def hook(self, i, p):
        n = self.of[i]
        at = self.places[i] - self.buckets[n][0]
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if self.missing[n] == 0:
            self.send(n)

    def land(self):
        if self.flying is not None:
            n, work, buffer, shard = self.flying
            work.wait()
            self.shards[n] = shard
            self.flying = None

    def send(self, n):
        buffer = self.open(n)
        del self.filling[n]
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.land()
        work = dist.reduce_scatter(shard, list(buffer.chunk(self.ranks)), group=self.group, async_op=True)
        self.flying = (n, work, buffer, shard)

    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        for n, missing in enumerate(self.missing):
            if missing:
                self.send(n)
        self.land()
        shards = [self.shards[n] for n in range(len(self.buckets))]
        self.reset()
        return shards
