from labkit.answers import Edit

WRONG = [
    Edit(
        "following = ask(i + 1)\n        x = forward(i, whole, x)",
        "x = forward(i, whole, x)\n        following = ask(i + 1)",
        told="have not been asked for",
    ),
    Edit(
        "group=group, async_op=True)\n\n    following",
        "group=group, async_op=True)\n\n    following",
        (
            "return whole, dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)",
            "work = dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)\n"
            "        work.wait()\n        return whole, work",
        ),
        told="nothing is hidden",
    ),
    # an FSDP that is DDP: weights stay
    Edit(
        "following = ask(0)",
        "here = {}\n    following = ask(0)",
        ("x = forward(i, whole, x)", "here[i] = whole\n        x = forward(i, whole, x)"),
        (
            "        if i < units - 1:  # the last unit's weights "
            "are still here\n            whole, work = following\n            work.wait()\n"
            "        following = ask(i - 1)\n",
            "        whole = here[i]\n",
        ),
        told="gathers",
    ),
    # gathered again, but never let go of
    Edit(
        "following = ask(0)",
        "here = []\n    following = ask(0)",
        ("x = forward(i, whole, x)", "here.append(whole)\n        x = forward(i, whole, x)"),
        told="still alive",
    ),
    # everything at once
    Edit(
        "following = ask(0)",
        "every = [ask(i) for i in range(units)]\n    following = every[0]",
        ("following = ask(i + 1)", "following = every[i + 1] if i + 1 < units else None"),
        told="one is enough",
    ),
    Edit(
        "leaving = dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient",
        "leaving = dist.all_reduce(gradient, group=group, async_op=True), gradient\n        gradients[i] = "
        "gradient.chunk(ranks)[dist.get_rank(group)]",
        told="calls all_reduce",
    ),
    Edit(
        "        if leaving:\n            leaving[0].wait()\n",
        "",
        ("async_op=True), gradient", "async_op=True), gradient\n        leaving[0].wait()"),
        told="nothing is hidden",
    ),
    Edit(
        "following = ask(i - 1)\n        dy, gradient = backward(i, whole, dy)",
        "dy, gradient = backward(i, whole, dy)\n        following = ask(i - 1)",
        told="have not been asked for",
    ),
    Edit("return y, gradients", "return y, gradients[::-1]", mistake="The gradients stand in the order in which they came; asked is the units'."),
    Edit("return y, gradients", "return y, [g / ranks for g in gradients]", mistake="Sum, do not average: who divides comes later."),
    Edit(
        "dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient",
        "dist.reduce_scatter_tensor(gradients[i], gradient, async_op=True), gradient",
    ),
    Edit("shards[i], group=group, async_op", "shards[i], async_op"),
    # gradients leave when all are there
    Edit(
        "        if leaving:\n            leaving[0].wait()\n"
        "        leaving = dist.reduce_scatter_tensor(gradients[i], "
        "gradient, group=group, async_op=True), gradient\n",
        "        leaving = [*(leaving or []), gradient]\n",
        (
            "    leaving[0].wait()\n",
            "    for shard, whole in zip(gradients, leaving[::-1]):\n        "
            "dist.reduce_scatter_tensor(shard, whole, group=group)\n",
        ),
        told="has not left",
    ),
]


# %% right: all_gather and reduce_scatter with lists of parts
from collections.abc import Callable

import torch
import torch.distributed as dist


def forward_backward(
    shards: list[torch.Tensor], forward: Callable, backward: Callable, x: torch.Tensor, gradient_of: Callable,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y and the shards of the gradients, in the order of the units."""
    ranks, last = dist.get_world_size(group), len(shards) - 1
    out = [None] * len(shards)

    def start(i):
        whole = shards[i].new_empty(len(shards[i]) * ranks)
        work = dist.all_gather(list(whole.chunk(ranks)), shards[i], group=group, async_op=True)
        return whole, work

    coming = start(0)
    for i in range(last + 1):
        whole, work = coming
        work.wait()
        if i < last:
            coming = start(i + 1)
        x = forward(i, whole, x)
        if i < last:
            del whole, work
    y = x
    dy = gradient_of(y)
    flying = None
    for i in range(last, -1, -1):
        if i < last:
            whole, work = coming
            work.wait()
        coming = start(i - 1) if i else None
        dy, gradient = backward(i, whole, dy)
        del whole
        if flying is not None:
            flying[1].wait()
        out[i] = torch.empty_like(shards[i])
        flying = gradient, dist.reduce_scatter(out[i], list(gradient.chunk(ranks)), group=group, async_op=True)
        del gradient
    flying[1].wait()
    return y, out


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


# %% right: tables of weights and handles
import torch
import torch.distributed as dist


def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    """Tables of weights and handles, whose entries are let go of when a unit has run."""
    ranks, units = dist.get_world_size(group), len(shards)
    weights, handles, gradients, leaving = {}, {}, {}, {}

    def ask(i):
        if 0 <= i < units and i not in weights:
            weights[i] = shards[i].new_empty(ranks * len(shards[i]))
            handles[i] = dist.all_gather_into_tensor(weights[i], shards[i], group=group, async_op=True)

    ask(0)
    for i in range(units):
        handles.pop(i).wait()
        ask(i + 1)
        x = forward(i, weights[i], x)
        if i + 1 < units:
            weights.pop(i)
    y, dy = x, gradient_of(x)
    for i in range(units)[::-1]:
        if i in handles:
            handles.pop(i).wait()
        ask(i - 1)
        dy, whole = backward(i, weights.pop(i), dy)
        for handle, _ in leaving.values():
            handle.wait()
        gradients[i] = torch.empty_like(shards[i])
        leaving = {i: (dist.reduce_scatter_tensor(gradients[i], whole, group=group, async_op=True), whole)}
    leaving[0][0].wait()
    return y, [gradients[i] for i in range(units)]


# %% wrong: keeps the unit before
# told: whole weights of 3 units are still alive
from collections.abc import Callable

import torch
import torch.distributed as dist


def forward_backward(
    shards: list[torch.Tensor], forward: Callable, backward: Callable, x: torch.Tensor, gradient_of: Callable,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y and the shards of the gradients, in the order of the units."""
    ranks, last = dist.get_world_size(group), len(shards) - 1
    out = [None] * len(shards)

    def start(i):
        whole = shards[i].new_empty(len(shards[i]) * ranks)
        work = dist.all_gather_into_tensor(whole.view(ranks, -1), shards[i].view(1, -1), group=group, async_op=True)
        return whole, work

    coming = start(0)
    for i in range(last + 1):
        whole, work = coming
        work.wait()
        if i < last:
            coming = start(i + 1)
        x = forward(i, whole, x)
        before = whole
    del before
    y = x
    dy = gradient_of(y)
    flying = None
    for i in range(last, -1, -1):
        if i < last:
            whole, work = coming
            work.wait()
        coming = start(i - 1) if i else None
        dy, gradient = backward(i, whole, dy)
        del whole
        if flying is not None:
            flying[1].wait()
        out[i] = torch.empty_like(shards[i])
        flying = gradient, dist.reduce_scatter_tensor(out[i], gradient, group=group, async_op=True)
        del gradient
    flying[1].wait()
    return y, out


# %% wrong: three gradients at once
# told: two units are still on their way
from collections.abc import Callable

import torch
import torch.distributed as dist


def forward_backward(
    shards: list[torch.Tensor], forward: Callable, backward: Callable, x: torch.Tensor, gradient_of: Callable,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y and the shards of the gradients, in the order of the units."""
    ranks, last = dist.get_world_size(group), len(shards) - 1
    out = [None] * len(shards)

    def start(i):
        whole = shards[i].new_empty(len(shards[i]) * ranks)
        work = dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)
        return whole, work

    coming = start(0)
    for i in range(last + 1):
        whole, work = coming
        work.wait()
        if i < last:
            coming = start(i + 1)
        x = forward(i, whole, x)
        if i < last:
            del whole, work
    y = x
    dy = gradient_of(y)
    flying = None
    for i in range(last, -1, -1):
        if i < last:
            whole, work = coming
            work.wait()
        coming = start(i - 1) if i else None
        dy, gradient = backward(i, whole, dy)
        del whole
        if flying is not None and len(flying) == 3:
            flying.pop(0)[1].wait()
        out[i] = torch.empty_like(shards[i])
        flying = (flying or []) + [(gradient, dist.reduce_scatter_tensor(out[i], gradient, group=group, async_op=True))]
        del gradient
    for f in flying: f[1].wait()
    return y, out


