from labkit.answers import Edit, Same

_NEGATIVE = "Python counts a negative index from the end"
_IN_ORDER = "messages of two ranks arrive in the order in which they were sent"
_A_HOP = "K and V may go round C times, as their gradients do"
_PART = "        part = torch.stack((dk, dv))\n"
_END = "    dk, dv = behind.wait()\n"
_BLOCK = "torch.stack((k, v))\n"
_STALE = (
    "You use another rank's keys and values: at step i the block must be that of rank (r - i) mod C, at step 0 your "
    "own."
)
_MASK = "The mask has the places of another rank: at step i the keys are those of rank (r - i) mod C."

WRONG = [
    Edit(_PART, f"{_PART}        own = own if step else part\n", (_END, "    behind.wait()\n    dk, dv = own\n"),
         mistake="dK and dV hold only what your own queries add. Other ranks' queries saw your keys too: the gradient "
         "must "
         "travel with the block and collect their parts."),
    Edit(_PART, f"{_PART}        sums = sums + part if step else part\n",
         (_END, "    behind.wait()\n    dk, dv = sums\n"),
         mistake="You add up gradients of different blocks. Those of a block belong to its owner: they travel with it "
         "and "
         "collect the parts of all ranks."),
    Edit("dq += more", "dq = more",
         mistake="dQ is that of the last step alone: the other blocks have their terms, too."),
    Edit("part = torch.stack((dk, dv))", "part = torch.stack((more, dk, dv))", (_END, _END.replace("dk,", "dq, dk,")),
         mistake="dQ has travelled and holds what other ranks' queries added. It stays here: only dK and dV travel."),
    Edit("part += behind.wait()", "behind.wait()",
         mistake="The gradient that arrives must be *added* to this rank's part before it travels on."),
    Edit(_END, "    behind.wait()\n    dk, dv = part\n",
         mistake="Each rank returns the gradient of the next rank's block: one more hop brings it home."),
    Edit("behind.wait()\n    return", "Shift(behind.wait(), cp, tag=1).wait()\n    return",
         mistake="Each rank returns the gradient of the block of the rank before: one hop too many."),
    # as the forward has left it
    Edit(_BLOCK, f"{_BLOCK}    for _ in range(cp.size - 1):\n        block = Shift(block, cp, tag=2).wait()\n",
         mistake=_STALE),
    Edit(_BLOCK, f"{_BLOCK}    block = Shift(block, cp, tag=2).wait()\n", mistake=_STALE),
    Edit("at[owner])", "at[cp.rank])", mistake=_MASK),
    Edit("cp.rank - step", "cp.rank + step", mistake=_MASK),
    Edit("dq += more", "dq += more / cp.size"),
    Edit(_END, f"{_END}    dout.zero_()\n", told="changes its input `dout`"),
    # gathers keys and values
    Edit(_BLOCK, f"{_BLOCK}    every = [torch.empty_like(block) for _ in at]\n"
         "    torch.distributed.all_gather(every, block, group=cp.group)\n",
         ("        more, dk", "        block = every[owner]\n        more, dk"), told="it calls all_gather"),
    # every block that came stays alive
    Edit("            block = shift.wait()", "            block = shift.wait()\n            come.append(block)",
         ("    for step in range", "    come = [block]\n    for step in range"), told="ten blocks"),
]

RIGHT = [
    # the package's way: the own part stays at home, C-1 hops
    Edit("        if step > 0:\n            part += behind.wait()\n        behind = Shift(part, cp, tag=1)",
         "        if step == 0:\n            home = part\n        else:\n            if step > 1:\n                "
         "part += behind.wait()\n"
         "            behind = Shift(part, cp, tag=1)", ("dk, dv = behind.wait()", "dk, dv = home + behind.wait()")),
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
        mine = out[:, rows], lse[:, rows], at[r][rows], at[j][cols]
        g = piece_backward(dout[:, rows], q[:, rows], k[:, cols], v[:, cols], *mine)
        dq[:, rows] += g[0]
        dk[:, cols] += g[1]
        dv[:, cols] += g[2]
        if step < cp.size - 1:
            k, v, dk, dv = on(k, v, dk, dv)
        else:
            dk, dv = on(dk, dv)
    return dq, dk, dv


# %% wrong: a part for each owner is kept for a second round
# told: ten blocks
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift

def ring_backward(dout, q, k, v, out, lse, at, cp):
    size, r, block, dq, parts = cp.size, cp.rank, torch.stack((k, v)), 0, {}
    for step in range(size):
        owner = (r - step) % size
        more, *rest = piece_backward(dout, q, *block, out, lse, at[r], at[owner])
        dq, parts[owner] = dq + more, torch.stack(rest)
        if step < size - 1:
            block = Shift(block, cp).wait()
    total = parts[(r - 1) % size]
    for step in range(1, size):
        total = Shift(total, cp).wait() + parts[(r - 1 - step) % size]
    return dq, *total


# %% wrong: all blocks come first
# told: ten blocks
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift

def ring_backward(dout, q, k, v, out, lse, at, cp):
    size, r, blocks, dq, total = cp.size, cp.rank, [torch.stack((k, v))], 0, 0
    for _ in range(size - 1):
        blocks.append(Shift(blocks[-1], cp).wait())
    for step in (*range(1, size), 0):
        more, *rest = piece_backward(dout, q, *blocks[step], out, lse, at[r], at[(r - step) % size])
        dq, total = dq + more, total + torch.stack(rest)
        if step:
            total = Shift(total, cp).wait()
    return dq, *total
