from labkit.answers import Edit, Same

_WAY = "group=self.group, async_op=True)"
_SCATTER = f"dist.reduce_scatter_tensor(self.shards[n], whole, {_WAY}"
_PARTS = "whole.chunk(dist.get_world_size(self.group))"
_SHARDS = "[self.shards[n] for n in range(len(self.buckets))]"
_FULL = "if self.missing[n] == 0:"
_TAKEN = "        self.open(n)[at : at + p.numel()] = p.grad.flatten()\n        p.grad = None\n"
_BEGIN = "        self.begin()\n\n"
_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"

WRONG = [
    Edit(_SCATTER, f"dist.all_reduce(whole, {_WAY}\n        self.shards[n] = whole", mistake="Each rank returns whole buckets; it keeps its own part of each."),
    Edit("        p.grad = None\n", "", mistake="The parameters still have their whole gradients: once it lies in its bucket, a gradient is let go."),
    Edit("return shards", "return [s / dist.get_world_size(self.group) for s in shards]", mistake="Sum, do not average: who divides comes later."),
    Edit("        self.begin()\n        return shards", "        return shards", mistake="The second step ends with the first one's sums: something of the first step is still there after finish()."),
    Edit(
        "self.whole, self.shards, self.travelling = {}, {}, []", "self.shards, self.travelling = {}, []",
        (_BEGIN, f"        self.whole = {{}}\n{_BEGIN}"), ("        del self.whole[n]\n", ""),
        mistake="A parameter without a gradient still has that of the step before: a bucket begins with zeros in every step.",
    ),
    Edit(
        "if n not in self.shards:", "if n in self.whole and n not in self.shards:",
        (_SHARDS, "[self.shards[n] for n in sorted(self.shards)]"),
        mistake="A bucket none of whose parameters has a gradient is reduced as well: its shard is zeros.",
    ),
    Edit(
        "if n not in self.shards:", "if n in self.whole and n not in self.shards:",
        (_SHARDS, "[self.shards.get(n) for n in range(len(self.buckets))]"),
        mistake="A bucket none of whose parameters has a gradient is reduced as well: its shard is zeros.",
    ),
    Edit(
        "partial(self.arrived, n, place - buckets[n][0])", "lambda p: self.arrived(n, place - buckets[n][0], p)",
        mistake="A lambda looks up its names when it is called, after the loop: every gradient goes to the place of the last parameter.",
    ),
    Edit(_SHARDS, "list(self.shards.values())", mistake="A bucket that was not full came last. The shards stand in the order of the buckets, whenever they left."),
    Edit(_SCATTER, f"dist.all_reduce(whole, {_WAY}\n        self.shards[n] = {_PARTS}[dist.get_rank(self.group)]", told="calls all_reduce"),
    Edit("async_op=True)\n", "async_op=True)\n        work.wait()\n", told="as soon as that has left"),
    Edit("        work.wait()\n", "", told="never waits for its reduce_scatter"),
    Edit(f"        {_FULL}\n            self.send(n)\n", "", told="has not left when"),
    Edit(_FULL, "if all(m == 0 for m in self.missing):", told="has not left when"),
    Edit("if len(self.travelling) > 1:", "if False:", told="holds"),
    Edit("        del self.whole[n]\n", "", told="holds"),
    # gradients stay on their parameters until a bucket is full
    Edit(
        _TAKEN, "        self.kept.setdefault(n, []).append((at, p))\n",
        (
            "        whole = self.open(n)\n",
            "        whole = self.open(n)\n        for at, p in self.kept.pop(n, []):\n"
            "            whole[at : at + p.numel()] = p.grad.flatten()\n            p.grad = None\n",
        ),
        (_BEGIN, f"        self.kept = {{}}\n{_BEGIN}"),
        told="holds",
    ),
    Edit(_FULL, "if self.missing[n] == 0 and n + 1 < len(self.buckets):"),
    # one buffer for all buckets, in which the next one fills while the last one travels
    Edit(
        "self.whole[n] = self.example.new_zeros(stop - start)",
        "self.whole[n] = self.memory[: stop - start].zero_() if not self.whole or self.travelling else "
        "self.example.new_zeros(stop - start)",
        (_BEGIN, f"        self.memory = params[0].new_zeros(max(stop - start for start, stop in buckets))\n{_BEGIN}"),
        told="writes into what its reduce_scatter still sends",
    ),
    Edit("group=self.group, async_op", "async_op"),
    Edit("[at : at + p.numel()] = p.grad", "[: p.numel()] = p.grad"),
    Edit("self.example.new_zeros", "torch.zeros"),
    Edit("p.grad.flatten()", "p.grad.view(-1)"),
    Edit("dist.get_world_size(self.group)", "dist.get_world_size()"),
]

RIGHT = [
    # lists of tensors
    Edit(_SCATTER, f"dist.reduce_scatter(self.shards[n], list({_PARTS}), {_WAY}"),
    # buckets leave in their order
    Edit(
        f"{_FULL}\n            self.send(n)\n",
        "while len(self.shards) < len(self.buckets) and self.missing[len(self.shards)] == 0:\n"
        "            self.send(len(self.shards))\n",
    ),
    # waits for the one before, then sends
    Edit(
        "        whole = self.open(n)\n",
        "        if self.travelling:\n            self.let_go()\n        whole = self.open(n)\n",
        ("        if len(self.travelling) > 1:\n            self.let_go()\n", ""),
    ),
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
