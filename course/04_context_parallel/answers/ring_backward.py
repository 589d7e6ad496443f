from labkit.answers import Edit, Same

_NEGATIVE = "Python counts a negative index from the end"
_IN_ORDER = "messages of two ranks arrive in the order in which they were sent"
_A_HOP = "K and V may go round C times, as their gradients do"

WRONG = [
    Edit(
        "        more, dk, dv",
        "        more, *both",
        (
            "dq += more",
            """dq += more
        dk, dv = both""",
        ),
        (
            "    dk, dv = behind.wait()\n",
            """        if step == 0:
            own = both
    behind.wait()
    dk, dv = own
""",
        ),
        mistake="dK and dV hold only what your own queries add. Other ranks' queries saw your keys too: the " "gradient must travel with the block and collect their parts.",
    ),
    # the last hop is missing
    Edit(
        "    dk, dv = behind.wait()",
        """    behind.wait()
    dk, dv = part""",
        mistake="Each rank returns the gradient of the next rank's block: one more hop brings it home.",
    ),
    Edit("part += behind.wait()", "behind.wait()", mistake="The gradient that arrives must be *added* to this rank's part before it travels on."),
    # stale: each rank begins with the block it received last in the forward
    Edit(
        "torch.stack((k, v))\n",
        """torch.stack((k, v))
    for _ in range(cp.size - 1):
        block = Shift(block, cp, tag=2).wait()
""",
        mistake="You use another rank's keys and values: at step i the block must be that of rank (r - i) mod C, " "at step 0 your own.",
    ),
    Edit(
        "torch.stack((k, v))\n",
        """torch.stack((k, v))
    block = Shift(block, cp, tag=2).wait()
""",
        mistake="You use another rank's keys and values: at step i the block must be that of rank (r - i) mod C, " "at step 0 your own.",
    ),
    Edit("at[owner])", "at[cp.rank])", told="At each step"),
]

RIGHT = [
    # the package's way: the own part stays at home, C-1 hops
    Edit(
        """        if step > 0:
            part += behind.wait()
        behind = Shift(part, cp, tag=1)""",
        """        if step == 0:
            home = part
        else:
            if step > 1:
                part += behind.wait()
            behind = Shift(part, cp, tag=1)""",
        ("dk, dv = behind.wait()", "dk, dv = home + behind.wait()"),
    ),
]

EQUIVALENT = [
    Same("line 14: 0 for 1", _A_HOP),
    Same("line 14: `+` for `-`", _A_HOP),
    Same("line 14: `<=` for `<`", _A_HOP),
    Same("line 14: always `Shift(block, cp)`", _A_HOP),
    Same("line 15: `% cp.size` dropped", _NEGATIVE),
    Same("line 21: 0 for 1", _IN_ORDER),
    Same("line 21: 2 for 1", "another number for the same"),
    Same("line 21: `tag` dropped", _IN_ORDER),
]


# %% right: one message a hop: block and gradient together
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift
def ring_backward(dout, q, k, v, out, lse, at, cp):
    all4 = torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
    dq = 0
    for step in range(cp.size):
        j = (cp.rank - step) % cp.size
        more, dk, dv = piece_backward(dout, q, all4[0], all4[1], out, lse, at[cp.rank], at[j])
        dq = dq + more
        all4[2] += dk
        all4[3] += dv
        all4 = Shift(all4, cp).wait()
    return dq, all4[2], all4[3]


# %% right: own messages, gradients of k and v apart, hidden halves left out
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.piece_backward import piece_backward
def ring_backward(dout, q, k, v, out, lse, at, cp):
    r, h = cp.rank, q.shape[1] // 2
    k, v, dq = k.contiguous(), v.contiguous(), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    def on(*ts):
        new = [torch.empty_like(t) for t in ts]
        works = [dist.isend(t, cp.ranks[(r + 1) % cp.size], group=cp.group) for t in ts]
        works += [dist.irecv(t, cp.ranks[r - 1], group=cp.group) for t in new]
        [w.wait() for w in works]
        return new
    for step in range(cp.size):
        j = (r - step) % cp.size
        rows = slice(h, None) if j > r else slice(None)
        cols = slice(0, h) if j < r else slice(None)
        g = piece_backward(dout[:, rows], q[:, rows], k[:, cols], v[:, cols], out[:, rows], lse[:, rows], at[r][rows], at[j][cols])
        dq[:, rows] += g[0]
        dk[:, cols] += g[1]
        dv[:, cols] += g[2]
        if step < cp.size - 1:
            k, v, dk, dv = on(k, v, dk, dv)
        else:
            dk, dv = on(dk, dv)
    return dq, dk, dv


# %% right: one message a step: the block and its gradient together
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward


def ring_backward(dout, q, k, v, out, lse, at, cp):
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[(cp.rank - 1) % cp.size]
    dq = 0
    block = torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
    for step in range(cp.size):
        more, dk, dv = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[(cp.rank - step) % cp.size])
        dq = dq + more
        block[2] += dk
        block[3] += dv
        leaving = block if step < cp.size - 1 else block[2:].contiguous()
        new = torch.empty_like(leaving)
        ops = [dist.P2POp(dist.isend, leaving, to, cp.group), dist.P2POp(dist.irecv, new, source, cp.group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        block = new
    return dq, block[0], block[1]


# %% right: the own part stays at home
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift
def ring_backward(dout, q, k, v, out, lse, at, cp):
    block = torch.stack((k, v))
    moving = Shift(block, cp)
    dq, dk, dv = piece_backward(dout, q, k, v, out, lse, at[cp.rank], at[cp.rank])
    grad = None
    for i in range(1, cp.size):
        block = moving.wait()
        if i < cp.size - 1:
            moving = Shift(block, cp)
        a, b, c = piece_backward(dout, q, *block, out, lse, at[cp.rank], at[(cp.rank - i) % cp.size])
        dq = dq + a
        g = torch.stack((b, c))
        if grad is not None:
            g += grad.wait()
        grad = Shift(g, cp, tag=1)
    b, c = grad.wait()
    return dq, dk + b, dv + c


# %% wrong: dq averaged
# mistake: dQ is divided by the number of ranks: it is the sum of the pieces' terms, not their mean.
import torch
from exercises.piece_backward import piece_backward

from minimegatron.comm.ring import Shift


def ring_backward(dout, q, k, v, out, lse, at, cp):
    dq, block, part = torch.zeros_like(q), torch.stack((k, v)), torch.zeros(2, *k.shape, dtype=k.dtype)
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, *both = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more / cp.size
        part = Shift(part + torch.stack(both), cp, tag=1).wait()
        if shift:
            block = shift.wait()
    return dq, part[0], part[1]


# %% wrong: dq of the last step
# mistake: dQ is that of the last step alone: the other blocks have their terms, too.
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward


def ring_backward(dout, q, k, v, out, lse, at, cp):
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[cp.rank - 1]

    def shift(x, tag):
        new = torch.empty_like(x)
        works = [dist.isend(x, to, group=cp.group, tag=tag), dist.irecv(new, source, group=cp.group, tag=tag)]
        return new, works, x

    def wait(new, works, x):
        for work in works:
            work.wait()
        return new

    dq, block = torch.zeros_like(q), torch.stack((k, v))
    for step in range(cp.size):
        ahead = shift(block, 0) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, dk, dv = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq = more
        part = torch.stack((dk, dv))
        if step > 0:
            part += wait(*behind)
        behind = shift(part, 1)
        if ahead:
            block = wait(*ahead)
    dk, dv = wait(*behind)
    return dq, dk, dv


# %% wrong: dq with the block
# mistake: dQ has travelled and holds what other ranks' queries added. It stays here: only dK and dV travel.
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift
def ring_backward(dout, q, k, v, out, lse, at, cp):
    block = torch.stack((k, v)); g = torch.zeros(3, *k.shape, dtype=k.dtype)
    for i in range(cp.size):
        sh = Shift(block, cp) if i < cp.size - 1 else None
        part = torch.stack(piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[(cp.rank - i) % cp.size]))
        g = Shift(g + part, cp, tag=1).wait()
        if sh: block = sh.wait()
    return g[0], g[1], g[2]


# %% wrong: own part twice
# mistake: Your own part of dK and dV is in the sum twice.
import torch
from exercises.piece_backward import piece_backward

from minimegatron.comm.ring import Shift


def ring_backward(dout, q, k, v, out, lse, at, cp):
    dq, block, part = torch.zeros_like(q), torch.stack((k, v)), torch.zeros(2, *k.shape, dtype=k.dtype)
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, *both = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more
        if step == 0:
            own = torch.stack(both)
        part = Shift(part + torch.stack(both), cp, tag=1).wait()
        if shift:
            block = shift.wait()
    part = part + own
    return dq, part[0], part[1]


# %% wrong: sums of different blocks
# mistake: You add up gradients of different blocks. Those of a block belong to its owner: they travel with it and collect the parts of all ranks.
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift
def ring_backward(dout, q, k, v, out, lse, at, cp):
    block = torch.stack((k, v)); dq = torch.zeros_like(q); g = torch.zeros_like(block)
    for i in range(cp.size):
        sh = Shift(block, cp) if i < cp.size - 1 else None
        a, b, c = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[(cp.rank - i) % cp.size])
        dq += a; g += torch.stack((b, c))
        if sh: block = sh.wait()
    return dq, g[0], g[1]


# %% wrong: adds into dout
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward


def ring_backward(dout, q, k, v, out, lse, at, cp):
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[cp.rank - 1]

    def shift(x, tag):
        new = torch.empty_like(x)
        works = [dist.isend(x, to, group=cp.group, tag=tag), dist.irecv(new, source, group=cp.group, tag=tag)]
        return new, works, x

    def wait(new, works, x):
        for work in works:
            work.wait()
        return new

    dq, block = torch.zeros_like(q), torch.stack((k, v))
    for step in range(cp.size):
        ahead = shift(block, 0) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, dk, dv = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more
        dout.mul_(1.0 if step < cp.size - 1 else 0.0)
        part = torch.stack((dk, dv))
        if step > 0:
            part += wait(*behind)
        behind = shift(part, 1)
        if ahead:
            block = wait(*ahead)
    dk, dv = wait(*behind)
    return dq, dk, dv


# %% wrong: gathers keys and values
# told: it calls all_gather
import torch
import torch.distributed as dist
import torch.nn.functional as F

from exercises.piece_backward import piece_backward
def ring_backward(dout, q, k, v, out, lse, at, cp):
    both = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(cp.size)]
        dist.all_gather(parts, x, group=cp.group)
        both.append(torch.cat(parts, 1))
    dq, dk, dv = piece_backward(dout, q, *both, out, lse, at[cp.rank], torch.cat(at))
    for x in (dk, dv):
        dist.all_reduce(x, group=cp.group)
    n = q.shape[1]
    mine = slice(cp.rank * n, cp.rank * n + n)
    return dq, dk[:, mine].contiguous(), dv[:, mine].contiguous()


