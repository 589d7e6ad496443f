# a ring buffer, and the package's collective
import math
import torch
from minimegatron.comm.collectives import all_reduce


class DelayedScale:
    def __init__(self, history, top):
        self.scale, self.top, self.h, self.i = 1.0, top, [0.0] * history, 0

    def note(self, x):
        self.h[self.i] = torch.tensor([self.h[self.i], *x.abs().flatten()]).amax().item()

    def at(self):
        return self.h[self.i]


def update(scales, tp):
    mine = torch.tensor([s.at() if s.at() == s.at() else math.inf for s in scales])
    for s, a in zip(scales, all_reduce(mine, tp, "max").tolist()):
        s.h[s.i] = a if math.isfinite(a) else 0.0
        if math.isfinite(a) and any(s.h):
            s.scale = s.top / max(s.h)
        s.i = (s.i + 1) % len(s.h)
        s.h[s.i] = 0.0
