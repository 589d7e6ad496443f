# told: before the next bucket is full
from functools import partial
import torch
import torch.distributed as dist


class GradientShards:
    """no overlap: bucket sent async at full, waited for when the NEXT parameter's gradient is about to be accumulated (tensor hook)"""
    def __init__(self, params, places, buckets, group=None):
        self.params, self.places, self.buckets, self.group = params, places, buckets, group
        self.ranks = dist.get_world_size(group)
        self.of = [next(n for n, (a, b) in enumerate(buckets) if a <= place < b) for place in places]
        for i, p in enumerate(params):
            p.register_hook(lambda g: self.land())
            p.register_post_accumulate_grad_hook(partial(self.hook, i))
        self.reset()
    def reset(self):
        self.missing = [self.of.count(n) for n in range(len(self.buckets))]
        self.filling, self.flying, self.shards = {}, None, {}
    def open(self, n):
        if n not in self.filling:
            a, b = self.buckets[n]
            self.filling[n] = torch.zeros(b - a, dtype=self.params[0].dtype)
        return self.filling[n]
    def hook(self, i, p):
        n = self.of[i]; at = self.places[i] - self.buckets[n][0]
        self.open(n)[at:at + p.numel()] = p.grad.flatten(); p.grad = None
        self.missing[n] -= 1
        if not self.missing[n]: self.send(n)
    def land(self):
        if self.flying:
            n, work, buffer, shard = self.flying; work.wait(); self.shards[n] = shard; self.flying = None
    def send(self, n):
        buffer = self.open(n); del self.filling[n]; self.land()
        shard = buffer.new_empty(len(buffer) // self.ranks)
        self.flying = n, dist.reduce_scatter_tensor(shard, buffer, group=self.group, async_op=True), buffer, shard
    def finish(self):
        for n, m in enumerate(self.missing):
            if m: self.send(n)
        self.land()
        out = [self.shards[n] for n in range(len(self.buckets))]; self.reset()
        return out
