# told: Each tensor has a scale of its own
import math
from collections import deque
import torch
import torch.distributed as dist
class DelayedScale:
    def __init__(self, history, top):
        self.scale = 1.0
        self.top, self.history, self.amax = top, deque(maxlen=history), 0.0
    def note(self, x):
        amax = x.detach().abs().max().item()
        self.amax = amax if math.isnan(amax) or amax > self.amax else self.amax
def update(scales, tp):
    amaxes = torch.tensor([one.amax if math.isfinite(one.amax) else math.inf for one in scales])
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=tp.group)
    for one, amax in zip(scales, amaxes.tolist()):
        one.amax = 0.0
        finite = bool(amaxes.isfinite().all())
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)
