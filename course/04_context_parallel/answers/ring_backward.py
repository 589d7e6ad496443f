from labkit.answers import Edit, Same

_BODY = """    shift = Shift(block, cp)
    own = add(slice(0, half), first, cp.rank)
    for step in range(1, cp.size):
        block = shift.wait()
        if step < cp.size - 1:
            shift = Shift(block, cp)
        part = add(slice(None), block, (cp.rank - step) % cp.size)
        if step > 1:
            part += behind.wait()
        behind = Shift(part, cp, tag=1)
    own += add(slice(half, None), first, cp.rank)
    own += behind.wait()
"""
# One loop, without the own block's halves: the gradients make C hops, and nothing is beside the last of them.
_LOOP = """    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        part = add(slice(None), block, (cp.rank - step) % cp.size)
        if step > 0:
            part += behind.wait()
        behind = Shift(part, cp, tag=1)
        if shift:
            block = shift.wait()
    own = behind.wait()
"""
_IN_ORDER = "messages of two ranks arrive in the order in which they were sent"
_ADDED = "        dq[:, rows] += more\n"
_BLOCK = "    dq, block = torch.zeros_like(q, dtype=wide), first\n"
_STALE = (
    "You use another rank's keys and values: at step i the block must be that of rank (r - i) mod C, at step 0 your "
    "own."
)
_MASK = "The mask has the places of another rank: at step i the keys are those of rank (r - i) mod C."
_ALONE = (
    "dK and dV hold only what your own queries add. Other ranks' queries saw your keys too: the gradient must "
    "travel with the block and collect their parts."
)
_DIFFERENT = (
    "You add up gradients of different blocks. Those of a block belong to its owner: they travel with it and "
    "collect the parts of all ranks."
)
_LAST = "dQ is that of the last step alone: the other blocks have their terms, too."
_HALF = "One half of your own block's work is missing in dQ, or in dK and dV: what is cut in two is added in two."


def _loop(*edits):
    """The one loop with these edits in place of the body."""
    text = _LOOP
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


WRONG = [
    Edit("    own += behind.wait()\n", "    behind.wait()\n", mistake=_ALONE),
    Edit("        if step > 1:\n", "        own = own + part\n        if step > 1:\n",
         ("    own += behind.wait()\n", "    behind.wait()\n"), mistake=_DIFFERENT),
    Edit(_ADDED, "        dq[:, rows] = more\n", (_BODY, _LOOP), mistake=_LAST),
    Edit("    own += add(slice(half, None), first, cp.rank)\n", "", mistake=_HALF),
    Edit("    own += add(slice(half, None), first, cp.rank)\n", "    add(slice(half, None), first, cp.rank)\n",
         mistake=_HALF),
    Edit("    own = add(slice(0, half), first, cp.rank)\n",
         "    add(slice(0, half), first, cp.rank)\n    own = torch.zeros_like(first, dtype=wide)\n", mistake=_HALF),
    Edit("part += behind.wait()", "behind.wait()",
         mistake="The gradient that arrives must be *added* to this rank's part before it travels on."),
    Edit(_BODY, _loop(("    own = behind.wait()\n", "    behind.wait()\n    own = part\n")),
         mistake="Each rank returns the gradient of the next rank's block: one more hop brings it home."),
    Edit("    own += behind.wait()\n", "    own += Shift(behind.wait(), cp, tag=1).wait()\n",
         mistake="What the other ranks have added for the block of the rank before comes to you: one hop too many."),
    Edit(_BODY, _loop(("own = behind.wait()", "own = Shift(behind.wait(), cp, tag=1).wait()")),
         mistake="Each rank returns the gradient of the block of the rank before: one hop too many."),
    # as the forward has left it
    Edit(_BLOCK, f"{_BLOCK}    for _ in range(cp.size - 1):\n        block = Shift(block, cp, tag=2).wait()\n"
         "    first = block\n", mistake=_STALE),
    Edit(_BLOCK, f"{_BLOCK}    first = block = Shift(block, cp, tag=2).wait()\n", mistake=_STALE),
    Edit("[rows], at[owner]]", "[rows], at[cp.rank]]", mistake=_MASK),
    Edit("cp.rank - step", "cp.rank + step", mistake=_MASK),
    Edit(_ADDED, "        dq[:, rows] += more / cp.size\n"),
    Edit("    return dq", "    dout.zero_()\n    return dq", told="changes its input `dout`"),
    # gathers keys and values
    Edit(_BLOCK, f"{_BLOCK}    every = [torch.empty_like(block) for _ in at]\n"
         "    torch.distributed.all_gather(every, block, group=cp.group)\n",
         told="it calls all_gather"),
    # every block that came stays alive
    Edit("        block = shift.wait()\n", "        block = shift.wait()\n        come.append(block)\n",
         ("    shift = Shift(block, cp)\n    own", "    come = [block]\n    shift = Shift(block, cp)\n    own"),
         told="twelve blocks"),
    # nothing is beside the last message
    Edit(_BODY, _LOOP, told="message 3 of 3: 0 multiply-adds"),
    Edit("    own += add(slice(half, None), first, cp.rank)\n    own += behind.wait()\n", "    own += behind.wait()\n",
         ("slice(0, half)", "slice(None)"), told="message 2 of 2: 0 multiply-adds"),
    # nothing is beside the first
    Edit("    shift = Shift(block, cp)\n    own = add(slice(0, half), first, cp.rank)\n",
         "    own = 0\n    shift = Shift(block, cp)\n", ("slice(half, None)", "slice(None)"),
         told="message 1 of 2: 0 multiply-adds"),
    # the own work is done while the wait for the first message is over
    Edit("    shift = Shift(block, cp)\n    own", "    shift = Shift(block, cp)\n    shift.wait()\n    own",
         told="message 1 of 2: 0 multiply-adds"),
    # one query is beside the last message
    Edit("slice(0, half)", "slice(0, -1)", ("slice(half, None)", "slice(-1, None)"), told="a quarter of a piece has"),
    # the gradient is waited for before the work on its block
    Edit("        part = add(slice(None), block, (cp.rank - step) % cp.size)\n        if step > 1:\n"
         "            part += behind.wait()\n",
         "        come = behind.wait() if step > 1 else 0\n"
         "        part = add(slice(None), block, (cp.rank - step) % cp.size) + come\n",
         told="0 multiply-adds are done between its start and the wait for it"),
    # bf16 all the way
    Edit("lse.dtype,", "q.dtype,", told="times that of one rounding"),
    # dK and dV travel in bf16
    Edit("return torch.stack((dk, dv))", "return torch.stack((dk, dv)).to(k.dtype)", told="times that of one rounding"),
    # dQ is rounded at each step
    Edit("torch.zeros_like(q, dtype=wide)", "torch.zeros_like(q)", ("dq.to(q.dtype)", "dq"),
         told="dq: its error is"),
    # each piece is computed in bf16
    Edit("of_rows = [t[:, rows].to(wide) for t in (out, lse)]", "of_rows = [t[:, rows].to(q.dtype) for t in (out, lse)]",
         ("dout[:, rows].to(wide), q[:, rows].to(wide), *block.to(wide)", "dout[:, rows], q[:, rows], *block"),
         ("torch.stack((dk, dv))", "torch.stack((dk, dv)).to(wide)"), told="times that of one rounding"),
    # K and V travel in fp32
    Edit("torch.stack((k, v))", "torch.stack((k, v)).to(lse.dtype)", told="bytes"),
    # what comes back is fp32
    Edit("dq.to(q.dtype), *own.to(k.dtype)", "dq, *own", told="dq is float32; the inputs are bfloat16"),
    # fp32 is too little for float64
    Edit("lse.dtype,", "torch.float32,",
         mistake="Where the inputs are float64 you compute in fp32. Only bf16 needs a wider dtype: lse has the right one."),
]

RIGHT = [
    # what the half of the own block adds travels, too: C hops
    Edit(_BODY, """    shift = Shift(block, cp)
    behind = Shift(add(slice(0, half), first, cp.rank), cp, tag=1)
    for step in range(1, cp.size):
        block = shift.wait()
        if step < cp.size - 1:
            shift = Shift(block, cp)
        part = add(slice(None), block, (cp.rank - step) % cp.size)
        part += behind.wait()
        behind = Shift(part, cp, tag=1)
    own = add(slice(half, None), first, cp.rank)
    own += behind.wait()
"""),
    # 2C blocks: K and V come home as well
    Edit(_BODY, """    shift = Shift(block, cp)
    behind = Shift(add(slice(0, half), first, cp.rank), cp, tag=1)
    for step in range(1, cp.size):
        block = shift.wait()
        shift = Shift(block, cp)
        part = add(slice(None), block, (cp.rank - step) % cp.size)
        part += behind.wait()
        behind = Shift(part, cp, tag=1)
    own = add(slice(half, None), first, cp.rank)
    own += behind.wait()
    shift.wait()
"""),
]

EQUIVALENT = [
    Same("line 12: 3 for 2", "any cut leaves a quarter of a piece to each side"),
    Same("line 12: rounded up for down", "2C divides s"),
    Same("line 17: `.to()` dropped", "the product with dout promotes out; lse has this dtype"),
    Same("line 28: `% cp.size` dropped", "Python counts a negative index from the end"),
    Same("line 28: `//` for `%`", "under the zigzag a mask depends only on which of two ranks comes first"),
    Same("line 31: 0 for 1", _IN_ORDER),
    Same("line 31: 2 for 1", "another number for the same"),
    Same("line 31: `tag` dropped", _IN_ORDER),
]


# %% right: the own block is cut by heads
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift

def ring_backward(dout, q, k, v, out, lse, at, cp):
    r, C, kv = cp.rank, cp.size, torch.stack((k, v))
    f = lse.dtype
    def piece(heads, kv, j):
        some = [t[heads].to(f) for t in (dout, q, *kv, out, lse)]
        dq, dk, dv = piece_backward(*some, at[r], at[j])
        return dq, torch.stack((dk, dv))
    h = (q.shape[0] + 1) // 2
    going, block, behind, dq = Shift(kv, cp), kv, None, 0
    one = piece(slice(h), kv, r)
    for i in range(1, C):
        block = going.wait()
        going = Shift(block, cp) if i + 1 < C else None
        more, part = piece(slice(None), block, (r - i) % C)
        dq = dq + more
        behind = Shift(part if behind is None else part + behind.wait(), cp, tag=1)
    two = piece(slice(h, None), kv, r)
    dq = dq + torch.cat((one[0], two[0]))
    dk, dv = torch.cat((one[1], two[1]), 1) + behind.wait()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


# %% right: own messages, K and V apart, the own block cut by keys, hidden halves left out
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward

def ring_backward(dout, q, k, v, out, lse, at, cp):
    r, C, h, f = cp.rank, cp.size, q.shape[1] // 2, lse.dtype
    all_, early, late = slice(None), slice(h), slice(h, None)
    dq = torch.zeros(q.shape, dtype=f)
    def start(ts, tag):
        ts = [t.contiguous() for t in ts]
        new = [torch.empty_like(t) for t in ts]
        works = [dist.irecv(t, cp.ranks[r - 1], group=cp.group, tag=tag) for t in new]
        works += [dist.isend(t, cp.ranks[(r + 1) % C], group=cp.group, tag=tag) for t in ts]
        def wait(keep=ts):
            for w in works:
                w.wait()
            return new
        return wait
    def piece(rows, cols, k, v, j):
        one = [t[:, rows].to(f) for t in (dout, q)] + [t[:, cols].to(f) for t in (k, v)]
        one += [out[:, rows].to(f), lse[:, rows], at[r][rows], at[j][cols]]
        more, dk, dv = piece_backward(*one)
        dq[:, rows] += more
        return dk, dv
    wait = start((k, v), 5)
    dk, dv = (torch.zeros(k.shape, dtype=f) for _ in range(2))
    dk[:, early], dv[:, early] = piece(all_, early, k, v, r)
    back, theirs = None, (k, v)
    for i in range(1, C):
        theirs, j = wait(), (r - i) % C
        if i < C - 1:
            wait = start(theirs, 5)
        rows, cols = (late, all_) if j > r else (all_, early)
        gk, gv = (torch.zeros(k.shape, dtype=f) for _ in range(2))
        gk[:, cols], gv[:, cols] = piece(rows, cols, *theirs, j)
        if back:
            a, b = back()
            gk += a
            gv += b
        back = start((gk, gv), 6)
    dk[:, late], dv[:, late] = piece(late, late, k, v, r)
    a, b = back()
    return dq.to(q.dtype), (dk + a).to(q.dtype), (dv + b).to(q.dtype)


# %% wrong: one message a hop: block and gradient together
# told: 0 multiply-adds
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


# %% wrong: dQ travels with dK and dV
# mistake: dQ has travelled and holds what other ranks' queries added. It stays here: only dK and dV travel.
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift

def ring_backward(dout, q, k, v, out, lse, at, cp):
    block, sums = torch.stack((k, v)), 0
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        j = (cp.rank - step) % cp.size
        sums = sums + torch.stack(piece_backward(dout, q, *block, out, lse, at[cp.rank], at[j]))
        sums = Shift(sums, cp, tag=1).wait()
        if shift:
            block = shift.wait()
    return tuple(sums)


# %% wrong: a part for each owner is kept for a second round
# told: twelve blocks
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
# told: twelve blocks
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


# %% right: sends first, receives in a blocking call after the work
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward

def ring_backward(dout, q, k, v, out, lse, at, cp):
    r, C, h, f = cp.rank, cp.size, q.shape[1] // 2, lse.dtype
    dq = torch.zeros(q.shape, dtype=f)
    def send(x):
        return x, dist.isend(x, group=cp.group, group_dst=(r + 1) % C)
    def receive(sent):
        x, work = sent
        new = torch.empty_like(x)
        dist.recv(new, group=cp.group, group_src=(r - 1) % C)
        work.wait()
        return new
    def piece(rows, kv, j):
        g = piece_backward(*(t[:, rows].to(f) for t in (dout, q)), *kv.to(f), *(t[:, rows].to(f) for t in (out, lse)),
                           at[r][rows], at[j])
        dq[:, rows] += g[0]
        return torch.stack(g[1:])
    mine = torch.stack((k, v))
    going, home, coming = send(mine), piece(slice(h, None), mine, r), None
    for i in range(1, C):
        theirs = receive(going)
        if i < C - 1:
            going = send(theirs)
        part = piece(slice(None), theirs, (r - i) % C)
        if coming:
            part += receive(coming)
        coming = send(part)
    home += piece(slice(0, h), mine, r)
    home += receive(coming)
    return dq.to(q.dtype), home[0].to(q.dtype), home[1].to(q.dtype)


# %% wrong: each receive blocks at once, and the send's handle alone is waited for later
# told: 0 multiply-adds
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward

def ring_backward(dout, q, k, v, out, lse, at, cp):
    r, C, h, f = cp.rank, cp.size, q.shape[1] // 2, lse.dtype
    dq, works = torch.zeros(q.shape, dtype=f), []
    def on(x):
        new = torch.empty_like(x)
        works.append(dist.isend(x, group=cp.group, group_dst=(r + 1) % C))
        dist.recv(new, group=cp.group, group_src=(r - 1) % C)
        return new
    def piece(rows, kv, j):
        g = piece_backward(*(t[:, rows].to(f) for t in (dout, q)), *kv.to(f), *(t[:, rows].to(f) for t in (out, lse)),
                           at[r][rows], at[j])
        dq[:, rows] += g[0]
        return torch.stack(g[1:])
    mine = torch.stack((k, v))
    theirs, home, total = on(mine), piece(slice(h, None), mine, r), 0
    for i in range(1, C):
        total = total + piece(slice(None), theirs, (r - i) % C)
        total = on(total)
        if i < C - 1:
            theirs = on(theirs)
    home += piece(slice(0, h), mine, r)
    [w.wait() for w in works]
    dk, dv = (home + total).to(q.dtype)
    return dq.to(q.dtype), dk, dv
