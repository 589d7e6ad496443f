from labkit.answers import Edit

_GATHER = "dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)"
_SCATTER = "dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient"
_LEAVE = f"        if leaving:\n            leaving[0].wait()\n        leaving = {_SCATTER}\n    leaving[0].wait()\n"
_FORTH, _BACK = "x = forward(i, whole, x)", "dy, gradient = backward(i, whole, dy)"

WRONG = [
    Edit("return y, gradients", "return y, [g / ranks for g in gradients]", mistake="Sum, do not average: who divides comes later."),
    Edit("return y, gradients", "return y, gradients[::-1]", mistake="The gradients stand in the order in which they came; asked is the units'."),
    Edit(f"following = ask(i + 1)\n        {_FORTH}", f"{_FORTH}\n        following = ask(i + 1)", told="have not been asked for"),
    Edit(f"following = ask(i - 1)\n        {_BACK}", f"{_BACK}\n        following = ask(i - 1)", told="have not been asked for"),
    Edit(f"return whole, {_GATHER}", f"work = {_GATHER}\n        work.wait()\n        return whole, work", told="nothing is hidden"),
    # an FSDP that is DDP: weights stay
    Edit(
        "following = ask(0)", "here = {}\n    following = ask(0)", (_FORTH, f"here[i] = whole\n        {_FORTH}"),
        (
            "        if i < units - 1:  # the last unit's weights are still here\n            whole, work = following\n"
            "            work.wait()\n        following = ask(i - 1)\n",
            "        whole = here[i]\n",
        ),
        told="gathers",
    ),
    # gathered again, but never let go of
    Edit("following = ask(0)", "here = []\n    following = ask(0)", (_FORTH, f"here.append(whole)\n        {_FORTH}"), told="still alive"),
    # the unit before is let go of too late
    Edit(_FORTH, f"{_FORTH}\n        before = whole", told="whole weights of 3 units are still alive"),
    # one buffer for all units: the next one's weights are written over those in use
    Edit(
        "    def ask(i):", "    whole = shards[0].new_empty(ranks * max(shard.numel() for shard in shards))\n\n    def ask(i):",
        ("whole = shards[i].new_empty(ranks * shards[i].numel())", "part = whole[: ranks * shards[i].numel()]"),
        (f"return whole, {_GATHER}", f"return part, {_GATHER.replace('whole', 'part')}"),
        ("            whole, work = following", "            part, work = following"),
        ("        whole, work = following\n        work.wait()\n        following = ask(i + 1)", "        part, work = following\n        work.wait()\n        following = ask(i + 1)"),
        ("forward(i, whole, x)", "forward(i, part, x)"), ("backward(i, whole, dy)", "backward(i, part, dy)"),
        told="written over before they have been used",
    ),
    # everything at once
    Edit(
        "following = ask(0)", "every = [ask(i) for i in range(units)]\n    following = every[0]",
        ("following = ask(i + 1)", "following = every[i + 1] if i + 1 < units else None"),
        told="one is enough",
    ),
    Edit(
        _SCATTER, "dist.all_reduce(gradient, group=group, async_op=True), gradient\n"
        "        gradients[i] = gradient.chunk(ranks)[dist.get_rank(group)]",
        told="calls all_reduce",
    ),
    Edit(_LEAVE, f"        leaving = {_SCATTER}\n        leaving[0].wait()\n", told="nothing is hidden"),
    # three gradients at once
    Edit(
        _LEAVE, f"        leaving = [*(leaving or []), ({_SCATTER})]\n        if len(leaving) > 3:\n"
        "            leaving.pop(0)[0].wait()\n    for work, _ in leaving:\n        work.wait()\n",
        told="two units are still on their way",
    ),
    # gradients leave when all are there
    Edit(
        _LEAVE, "        leaving = [*(leaving or []), gradient]\n    for shard, whole in zip(gradients, leaving[::-1]):\n"
        "        dist.reduce_scatter_tensor(shard, whole, group=group)\n",
        told="has not left",
    ),
    Edit(_SCATTER, _SCATTER.replace("group=group, ", "")),
    Edit(_GATHER, _GATHER.replace("group=group, ", "")),
]

RIGHT = [
    # lists of parts
    Edit(
        _GATHER, "dist.all_gather(list(whole.chunk(ranks)), shards[i], group=group, async_op=True)",
        ("reduce_scatter_tensor(gradients[i], gradient,", "reduce_scatter(gradients[i], list(gradient.chunk(ranks)),"),
    ),
    # a view by ranks
    Edit("_into_tensor(whole, shards[i],", "_into_tensor(whole.view(ranks, -1), shards[i].view(1, -1),"),
]


# %% right: functional collectives, the last unit gathered twice
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc
def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    """functional collectives, the last gathered twice"""
    g = group or dist.group.WORLD
    n = len(shards)
    order = list(range(n)) + list(reversed(range(n)))
    nxt = fc.all_gather_tensor(shards[0], 0, g)
    out = [None] * n; prev = None
    for k, i in enumerate(order):
        whole = fc.wait_tensor(nxt)
        nxt = fc.all_gather_tensor(shards[order[k + 1]], 0, g) if k + 1 < 2 * n else None
        if k < n:
            x = forward(i, whole, x)
            if k == n - 1: y, dy = x, gradient_of(x)
        else:
            dy, grad = backward(i, whole, dy)
            if prev is not None: out[prev] = fc.wait_tensor(out[prev])
            out[i] = fc.reduce_scatter_tensor(grad, "sum", 0, g); prev = i
        del whole
    out[prev] = fc.wait_tensor(out[prev])
    return y, out


# %% right: a generator gathers, the last unit twice
import torch
import torch.distributed as dist


def coming(shards, order, group):
    """(unit, its whole weights) one after the other, the next on its way."""
    ranks, following = dist.get_world_size(group), None
    for here, after in zip([None, *order], [*order, None]):
        if here is not None:
            whole, handle = following
            handle.wait()
        if after is not None:
            buffer = shards[after].new_empty(ranks * len(shards[after]))
            following = buffer, dist.all_gather_into_tensor(buffer, shards[after], group=group, async_op=True)
            del buffer
        if here is not None:
            yield here, whole


def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    """A generator gathers; the last unit twice."""
    units = range(len(shards))
    dy, gradients, leaving = None, [torch.empty_like(shard) for shard in shards], None
    for step, (i, whole) in enumerate(coming(shards, [*units, *reversed(units)], group)):
        if step < len(units):
            x = forward(i, whole, x)
            continue
        dy, gradient = backward(i, whole, gradient_of(x) if dy is None else dy)
        if leaving:
            leaving[0].wait()
        leaving = dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient
    leaving[0].wait()
    return x, gradients


# %% right: a unit's memory is taken away and given back, as FSDP does
import torch
import torch.distributed as dist


class Unit:
    def __init__(self, shard, group):
        self.shard, self.group = shard, group
        self.whole = shard.new_empty(dist.get_world_size(group) * len(shard))
        self.free()

    def ask(self):
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            self.work = dist.all_gather_into_tensor(self.whole, self.shard, group=self.group, async_op=True)

    def here(self):
        self.work.wait()
        return self.whole

    def free(self):
        self.whole.untyped_storage().resize_(0)

    def reduce(self, gradient):
        self.sent, self.mine = gradient, torch.empty_like(self.shard)
        self.reducing = dist.reduce_scatter_tensor(self.mine, gradient, group=self.group, async_op=True)

    def reduced(self):
        self.reducing.wait()
        del self.sent


def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    units = [Unit(shard, group) for shard in shards]
    last = len(units) - 1
    units[0].ask()
    for i, unit in enumerate(units):
        whole = unit.here()
        if i < last:
            units[i + 1].ask()
        x = forward(i, whole, x)
        if i < last:
            unit.free()
    dy = gradient_of(x)
    for i in range(last, -1, -1):
        whole = units[i].whole if i == last else units[i].here()
        if i:
            units[i - 1].ask()
        dy, gradient = backward(i, whole, dy)
        units[i].free()
        if i < last:
            units[i + 1].reduced()
        units[i].reduce(gradient)
        del gradient
    units[0].reduced()
    return x, [unit.mine for unit in units]
