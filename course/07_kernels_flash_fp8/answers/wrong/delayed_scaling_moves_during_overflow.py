# told: leaves the scale as it is
import torch
import torch.distributed as dist


class DelayedScale:
    def __init__(self, history, top):
        self.scale, self.top, self.history, self.past, self.amax = 1.0, top, history, [], torch.zeros(())

    def note(self, x):
        self.amax = torch.maximum(self.amax, x.abs().max())


def update(scales, tp):
    new = torch.stack([one.amax for one in scales])
    dist.all_reduce(new, op=dist.ReduceOp.MAX, group=tp.group)
    for one, amax in zip(scales, new.nan_to_num(0.0, posinf=0.0).tolist()):
        one.past = [*one.past, amax][-one.history :]
        if max(one.past) > 0:
            one.scale = one.top / max(one.past)
        one.amax = torch.zeros(())
