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
