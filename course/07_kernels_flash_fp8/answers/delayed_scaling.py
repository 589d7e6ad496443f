from labkit.answers import Edit, Same

WRONG = [
    Edit(".nan_to_num(torch.inf, torch.inf)  # MAX could lose a NaN", "", mistake="A NaN of some rank is lost: an all-reduce with MAX may drop it. Send infinity in its place."),
    # each rank decides by its own tensor
    Edit(
        "    dist.all_reduce(together",
        "    mine = together.tolist()\n    dist.all_reduce(together",
        (
            "for one, amax in zip(scales, together.tolist()):",
            "for one, amax, own in zip(scales, together.tolist(), mine):",
        ),
        ('finite = amax < float("inf")', 'finite = own < float("inf")'),
        mistake="Each rank decides by its own tensor whether the step overflowed: decide by what all of them " "have.",
    ),
    Edit("x.detach().abs().max()", "x.detach().abs_().max()", told="note changes the tensor"),
    Edit(
        "        self.amax = torch.maximum",
        "        self.last = x\n        self.amax = torch.maximum",
        told="note keeps",
    ),
    Edit(
        "        self.amax = torch.maximum",
        "        self.last = x.abs()\n        self.amax = torch.maximum",
        told="note keeps",
    ),
    Edit("    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)\n", "", mistake="Each rank saw a part of the tensor: the largest of all counts."),
    Edit("dist.ReduceOp.MAX", "dist.ReduceOp.SUM"),
    # each rank hides its own infinity
    Edit(
        "torch.stack([one.amax for one in scales])",
        "torch.stack([one.amax for one in scales]).nan_to_num(0.0, 0.0)",
    ),
    Edit("[-one.history :]", "[-1:]", mistake="The largest of the last `history` steps, not of the last one."),
    # the mean of the history
    Edit("one.scale = one.top / max(one.past)", "one.scale = one.top * len(one.past) / sum(one.past)"),
    # moves as soon as it notes
    Edit(
        "self.amax = torch.maximum(self.amax, x.detach().abs().max())",
        "self.amax = torch.maximum(self.amax, x.detach().abs().max()); self.scale = self.top / self.amax.item()",
    ),
    Edit(
        "self.amax = torch.maximum(self.amax, x.detach().abs().max())",
        "self.amax = x.detach().abs().max()"),
    Edit(".abs().max())", ".max())"),
    Edit("        one.amax = torch.zeros(())\n", ""),
    Edit("amax if finite else 0.0", "amax"),
    Edit(
        "    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)\n",
        """    for i in range(len(scales)):
        dist.all_reduce(together[i], op=dist.ReduceOp.MAX, group=tp.group)
""",
        told="one for all tensors",
    ),
    Edit("x.detach().abs().max()", "x.detach().max().abs()"),
    Edit("x.detach().abs().max()", "(-x.detach()).max()"),
    Edit("if finite and max(one.past) > 0", "if max(one.past) > 0"),
    Edit("if finite and max(one.past) > 0", "if finite and amax > 0 and max(one.past) > 0"),
    Edit("if finite and max(one.past) > 0", "if finite"),
    Edit(
        "torch.maximum(self.amax, x.detach().abs().max())",
        "torch.tensor(max(self.amax.item(), x.abs().max().item()))",
        mistake="NaN is lost: a step with NaN has overflowed, too. (Python's max(a, nan) is a.)",
    ),
    Edit(
        "torch.maximum(self.amax, x.detach().abs().max())",
        "torch.fmax(self.amax, x.detach().abs().max())",
        mistake="NaN is lost: a step with NaN has overflowed, too. (Python's max(a, nan) is a.)",
    ),
    Edit("[-one.history :]", "[-one.history - 1 :]"),
    Edit("[-one.history :]", ""),
    Edit("[-one.history :]", "[-4:]"),
    Edit("one.top / max", "448.0 / max"),
    Edit("amax if finite else 0.0]", "*([amax] if finite else [])]", mistake="A step that overflows belongs to the history, too: as 0, so that the oldest step leaves."),
    Edit(", group=tp.group", "", told="with a group smaller than the world"),
    # a step that overflows begins a new history
    Edit("        if finite and", "        one.past = one.past if finite else [0.0]\n        if finite and"),
]

RIGHT = [
    Edit(
        "[*one.past, amax if finite else 0.0][-one.history :]",
        "([amax if finite else 0.0] + one.past)[: one.history]",
    ),
]

EQUIVALENT = [
    Same("line 13: `.detach()` dropped", "inside of an autograd.Function, where it is called, nothing is recorded"),
]


# %% right: the history is a tensor that shifts
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


# %% right: a deque, a gathered table in one message
from collections import deque
import torch
import torch.distributed as dist


class DelayedScale:
    def __init__(self, history, top):
        self.scale, self.top, self.seen, self.past = 1.0, top, [], deque(maxlen=history)

    def note(self, x):
        self.seen += [x.detach().min().neg(), x.detach().max()]


def update(scales, tp):
    mine = torch.stack([torch.stack(one.seen).max() for one in scales])
    table = [torch.empty_like(mine) for _ in range(tp.size)]
    dist.all_gather(table, mine, group=tp.group)
    for one, amax in zip(scales, torch.stack(table).amax(0)):
        one.seen = []
        one.past.append(amax.nan_to_num(nan=0.0, posinf=0.0))
        if torch.isfinite(amax) and max(one.past) > 0:
            one.scale = (one.top / max(one.past)).item()


# %% right: a functional collective, a property
import torch
import torch.distributed._functional_collectives as funcol


class DelayedScale:
    def __init__(self, history, top):
        self.top, self.history, self.past, self._scale, self.amax = top, history, (), 1.0, torch.tensor(0.0)

    @property
    def scale(self):
        return self._scale

    def note(self, x):
        self.amax = torch.cat((self.amax[None], x.detach().abs().flatten())).max()

    def end(self, amax):
        self.amax = torch.tensor(0.0)
        finite = float("-inf") < amax < float("inf")
        self.past = (amax if finite else 0.0, *self.past)[: self.history]
        largest = sorted(self.past)[-1]
        if finite and largest:
            self._scale = self.top / largest


def update(scales, tp):
    mine = torch.stack([one.amax for one in scales])
    together = funcol.all_reduce(torch.where(mine.isnan(), torch.inf, mine), "max", tp.group)
    for one, amax in zip(scales, together.tolist()):
        one.end(amax)


# %% right: a deque, and the maxima by an all-gather
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
    parts = [torch.empty_like(amaxes) for _ in range(dist.get_world_size(tp.group))]
    dist.all_gather(parts, amaxes, group=tp.group)
    amaxes = torch.stack(parts).max(0).values
    for one, amax in zip(scales, amaxes.tolist()):
        one.amax = 0.0
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)


# %% wrong: amax stays
# mistake: Something older than the last `history` steps still counts: an amax that stays in the history, or one that is not 0 when a new step begins.
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
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)


# %% wrong: infinity is dropped
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
        if math.isfinite(amax):
            self.amax = max(self.amax, amax)
def update(scales, tp):
    amaxes = torch.tensor([one.amax if math.isfinite(one.amax) else math.inf for one in scales])
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=tp.group)
    for one, amax in zip(scales, amaxes.tolist()):
        one.amax = 0.0
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)


# %% wrong: largest number
import math
from collections import deque
import torch
import torch.distributed as dist
class DelayedScale:
    def __init__(self, history, top):
        self.scale = 1.0
        self.top, self.history, self.amax = top, deque(maxlen=history), 0.0
    def note(self, x):
        amax = x.detach().max().item()
        self.amax = amax if math.isnan(amax) or amax > self.amax else self.amax
def update(scales, tp):
    amaxes = torch.tensor([one.amax if math.isfinite(one.amax) else math.inf for one in scales])
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=tp.group)
    for one, amax in zip(scales, amaxes.tolist()):
        one.amax = 0.0
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)


# %% wrong: mean over ranks
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
    dist.all_reduce(amaxes, dist.ReduceOp.SUM, group=tp.group)
    amaxes /= dist.get_world_size(tp.group)
    for one, amax in zip(scales, amaxes.tolist()):
        one.amax = 0.0
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)


# %% wrong: overflow stops all tensors
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


# %% wrong: zeros reset the scale
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
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite:
            one.scale = one.top / max(one.history) if max(one.history) else 1.0
# %% wrong: message in bf16
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
    amaxes = torch.tensor([one.amax if math.isfinite(one.amax) else math.inf for one in scales], dtype=torch.bfloat16)
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=tp.group)
    for one, amax in zip(scales, amaxes.tolist()):
        one.amax = 0.0
        finite = math.isfinite(amax)
        one.history.append(amax if finite else 0.0)
        if finite and max(one.history) > 0:
            one.scale = one.top / max(one.history)


