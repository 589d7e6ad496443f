# the history is a tensor that shifts
import math
import torch
import torch.distributed as dist


class DelayedScale:
    def __init__(self, history, top):
        self.scale, self.top = torch.ones(()), top
        self.h = torch.zeros(history)
        self.now = 0.0

    def note(self, x):
        seen = float(x.abs().max())
        self.now = max(self.now, math.inf if math.isnan(seen) else seen)


def update(scales, tp):
    t = torch.tensor([s.now for s in scales])
    dist.all_reduce(t, dist.ReduceOp.MAX, group=tp.group)
    for s, a in zip(scales, t):
        s.now = 0.0
        s.h = torch.cat((s.h[1:], torch.where(a.isfinite(), a, 0.0)[None]))
        if a.isfinite() and s.h.max() > 0:
            s.scale = s.top / s.h.max()
