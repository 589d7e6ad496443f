from labkit.answers import Edit, Same

_NEGATIVE = "Python counts a negative index from the end"

WRONG = [
    Edit(
        "            block = shift.wait()",
        "            shift.wait()",
        mistake="The same keys and values at every step: go on with what `wait()` returns.",
    ),
    Edit("range(cp.size):", "range(1):", mistake="That is this rank's own block alone. All blocks must come by."),
    Edit(
        "mine = q.shape[1] // 2, at[cp.rank]",
        "mine = q.shape[1] // 2, torch.arange(q.shape[1])",
        ("at[owner]", "mine"),
        mistake="The mask needs places in the whole sequence: at[cp.rank] and at[owner].",
    ),
    # waits before it computes
    Edit(
        "        owner = (cp.rank",
        """        new = shift.wait() if shift else None
        owner = (cp.rank""",
        ("block = shift.wait()", "block = new"),
        told="Nothing is computed between sending and waiting",
    ),
    # all of q against all of the block
    Edit(
        "(slice(0, half), slice(half, None))",
        "(slice(None),)",
        (", half)\n", ", 2 * half)\n"),
        told="cut q in halves and the keys in blocks",
    ),
    Edit("(slice(0, half), slice(half, None))", "(slice(None),)", told="each half of q by itself"),
    Edit(", half)\n", ", 2 * half)\n", told="blocks of n/2 keys"),
    # a block further than needed
    Edit("if step < cp.size - 1 else None", "if True else None", told="C hops"),
]

EQUIVALENT = [
    Same("line 12: rounded up for down", "2 divides a rank's tokens"),
    Same("line 13: `ones_like` for `zeros_like`", "with an lse of -inf it has no weight"),
    Same("line 17: `% cp.size` dropped", _NEGATIVE),
]


# %% right: own isends, K and V in two messages, own attention over the quarters of which something is seen
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

from exercises.merge import merge
def ring_forward(q, k, v, at, cp):
    h, r, k, v = q.shape[1] // 2, cp.rank, k.contiguous(), v.contiguous()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    to, source = cp.ranks[(r + 1) % cp.size], cp.ranks[r - 1]
    for step in range(cp.size):
        j, works = (r - step) % cp.size, []
        if step < cp.size - 1:
            new = torch.empty_like(k), torch.empty_like(v)
            works = [dist.irecv(t, source, group=cp.group) for t in new]
            works += [dist.isend(t, to, group=cp.group) for t in (k, v)]
        for rows in (slice(h), slice(h, 2 * h)):
            for cols in (slice(h), slice(h, 2 * h)):
                if at[j][cols].min() <= at[r][rows].max():
                    more = piece(q[:, rows], k[:, cols], v[:, cols], at[r][rows], at[j][cols])
                    out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *more)
        for work in works:
            work.wait()
        if works:
            k, v = new
    return out, lse


# %% right: sends first, receives in a blocking call after the work
import torch
import torch.distributed as dist
from exercises.attend import attend
from exercises.merge import merge


def ring_forward(q, k, v, at, cp):
    n = q.shape[1]
    halves = torch.arange(n).chunk(2)
    results = {}
    block = torch.stack((k, v)).contiguous()
    for step in range(cp.size):
        sent = None
        if step < cp.size - 1:
            sent = dist.isend(block, group=cp.group, group_dst=(cp.rank + 1) % cp.size)
        owner = (cp.rank - step) % cp.size
        for i, rows in enumerate(halves):
            piece = attend(q[:, rows], *block, at[cp.rank][rows], at[owner], n // 2)
            results[i] = merge(*results[i], *piece) if i in results else piece
        if sent is not None:
            new = torch.empty_like(block)
            dist.recv(new, group=cp.group, group_src=(cp.rank - 1) % cp.size)
            sent.wait()
            block = new
    outs, lses = zip(*results.values())
    return torch.cat(outs, 1), torch.cat(lses, 1)


# %% right: all pieces kept, and joined at the end by one softmax of their lse
import torch
from exercises.attend import attend

from minimegatron.comm.ring import Shift


def ring_forward(q, k, v, at, cp):
    half, mine, block, found = q.shape[1] // 2, at[cp.rank], torch.stack((k, v)), []
    for step in range(cp.size):
        shift = Shift(block, cp) if step + 1 < cp.size else None
        owner = at[(cp.rank - step) % cp.size]
        early, late = (
            attend(rows, block[0], block[1], places, owner, half)
            for rows, places in zip(q.split(half, 1), mine.split(half))
        )
        found.append((torch.cat((early[0], late[0]), 1), torch.cat((early[1], late[1]), 1)))
        block = shift.wait() if shift else block
    outs, lses = (torch.stack(parts) for parts in zip(*found))
    return (lses.softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)


# %% right: quarters: a half of the rows with a half of the keys
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    block = torch.stack((k, v)); n = q.shape[1]; h = n // 2
    mine = at[cp.rank]
    out = lse = None
    for i in range(cp.size):
        moving = Shift(block, cp) if i + 1 < cp.size else None
        theirs = at[(cp.rank - i) % cp.size]
        outs, lses = [], []
        for a, b in ((0, h), (h, n)):
            o, l = torch.zeros_like(q[:, a:b]), q.new_full((q.shape[0], b - a), -torch.inf)
            for c, e in ((0, h), (h, n)):
                if theirs[c:e].min() <= mine[a:b].max():
                    o, l = merge(o, l, *attend(q[:, a:b], block[0, :, c:e], block[1, :, c:e], mine[a:b], theirs[c:e], e - c))
            outs.append(o); lses.append(l)
        o, l = torch.cat(outs, 1), torch.cat(lses, 1)
        out, lse = (o, l) if out is None else merge(out, lse, o, l)
        if moving: block = moving.wait()
    return out, lse


# %% wrong: averages pieces
# mistake: Pieces are not averaged: merge them by their lse.
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    block, outs, lses = torch.stack((k, v)), [], []
    for i in range(cp.size):
        o, l = piece(q, *block, at[cp.rank], at[(cp.rank - i) % cp.size])
        outs.append(o); lses.append(l)
        block = Shift(block, cp).wait() if i < cp.size - 1 else block
    return torch.stack(outs).mean(0), torch.logsumexp(torch.stack(lses), 0)


# %% wrong: knows zigzag alone
# mistake: You skip the late half of every earlier rank's block. That is right for zigzag alone: compare the places in `at`.
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    n = q.shape[1]; h = n // 2
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    block = torch.stack((k, v))
    for i in range(cp.size):
        sh = Shift(block, cp) if i < cp.size - 1 else None
        owner = (cp.rank - i) % cp.size
        kk, vv = block
        me, th = at[cp.rank], at[owner]
        todo = [(slice(0, h), slice(0, h)), (slice(h, n), slice(0, n))] if i == 0 else \
            [(slice(0, n), slice(0, h))] if owner < cp.rank else [(slice(h, n), slice(0, n))]
        for a, b in todo:
            o, l = attend(q[:, a], kk[:, b], vv[:, b], me[a], th[b], h)
            out[:, a], lse[:, a] = merge(out[:, a], lse[:, a], o, l)
        if sh: block = sh.wait()
    return out, lse


# %% wrong: later ranks not hidden
# mistake: Blocks of later ranks are not hidden: with zigzag your late half sees all of them.
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

from exercises.merge import merge
def ring_forward(q, k, v, at, cp):
    h, r = q.shape[1] // 2, cp.rank
    to, source = cp.ranks[(r + 1) % cp.size], cp.ranks[r - 1]
    for step in range(cp.size):
        j, works = (r - step) % cp.size, []
        if step < cp.size - 1:
            new = torch.empty_like(k), torch.empty_like(v)
            works = [dist.irecv(t, source, group=cp.group) for t in new]
            works += [dist.isend(t, to, group=cp.group) for t in (k, v)]
        if j == r:
            out, lse = piece(q, k, v, at[r], at[r])
        elif j < r:
            out, lse = merge(out, lse, *piece(q, k[:, :h], v[:, :h], at[r], at[j][:h]))
        elif False:
            late = merge(out[:, h:], lse[:, h:], *piece(q[:, h:], k, v, at[r][h:], at[j]))
            out, lse = torch.cat((out[:, :h], late[0]), 1), torch.cat((lse[:, :h], late[1]), 1)
        for work in works:
            work.wait()
        if works:
            k, v = new
    return out, lse


# %% wrong: own block at every step
# mistake: You send your own block at every step. Send on the block that came.
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    h = q.shape[1] // 2
    parts = [(torch.zeros_like(x), x.new_full(x.shape[:2], float("-inf"))) for x in q.split(h, 1)]
    mine = block = torch.stack((k, v))
    for i in range(cp.size):
        sh = Shift(mine, cp) if i < cp.size - 1 else None
        parts = [merge(*old, *attend(x, *block, p, at[(cp.rank - i) % cp.size], h)) for old, x, p in zip(parts, q.split(h, 1), at[cp.rank].split(h))]
        if sh: block = sh.wait()
    return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)


# %% wrong: owner counts up
# mistake: The mask has the places of another rank: at step i the keys are those of rank (r - i) mod C.
import torch
import torch.distributed as dist
from exercises.attend import attend
from exercises.merge import merge


def ring_forward(q, k, v, at, cp):
    half, mine = q.shape[1] // 2, at[cp.rank]
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[cp.rank - 1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    block = torch.stack((k, v))
    for step in range(cp.size):
        works, new = [], torch.empty_like(block)
        if step < cp.size - 1:
            works = [dist.isend(block, to, group=cp.group), dist.irecv(new, source, group=cp.group)]
        owner = (cp.rank + step) % cp.size
        for rows in (slice(0, half), slice(half, None)):
            piece = attend(q[:, rows], block[0], block[1], mine[rows], at[owner], half)
            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)
        for work in works:
            work.wait()
        block = new
    return out, lse


# %% wrong: scores not scaled
# mistake: The scores are divided by sqrt(d).
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) , -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

from exercises.merge import merge
def ring_forward(q, k, v, at, cp):
    h, r = q.shape[1] // 2, cp.rank
    to, source = cp.ranks[(r + 1) % cp.size], cp.ranks[r - 1]
    for step in range(cp.size):
        j, works = (r - step) % cp.size, []
        if step < cp.size - 1:
            new = torch.empty_like(k), torch.empty_like(v)
            works = [dist.irecv(t, source, group=cp.group) for t in new]
            works += [dist.isend(t, to, group=cp.group) for t in (k, v)]
        if j == r:
            out, lse = piece(q, k, v, at[r], at[r])
        elif j < r:
            out, lse = merge(out, lse, *piece(q, k[:, :h], v[:, :h], at[r], at[j][:h]))
        else:
            late = merge(out[:, h:], lse[:, h:], *piece(q[:, h:], k, v, at[r][h:], at[j]))
            out, lse = torch.cat((out[:, :h], late[0]), 1), torch.cat((lse[:, :h], late[1]), 1)
        for work in works:
            work.wait()
        if works:
            k, v = new
    return out, lse


# %% wrong: a fake product while it travels
import torch
import torch.distributed as dist
from exercises.attend import attend
from exercises.merge import merge


def ring_forward(q, k, v, at, cp):
    half, mine = q.shape[1] // 2, at[cp.rank]
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[cp.rank - 1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    block = torch.stack((k, v))
    for step in range(cp.size):
        works, new = [], torch.empty_like(block)
        if step < cp.size - 1:
            works = [dist.isend(block, to, group=cp.group), dist.irecv(new, source, group=cp.group)]
        for rows in (slice(0, half), slice(half, None)):
            attend(q[:, rows], block[0], block[1], mine[rows], at[(cp.rank - step) % cp.size], half)
        for work in works:
            work.wait()
        owner = (cp.rank - step) % cp.size
        for rows in (slice(0, half), slice(half, None)):
            piece = attend(q[:, rows], block[0], block[1], mine[rows], at[owner], half)
            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)
        block = new
    return out, lse


# %% wrong: gathers keys and values
# told: it calls all_gather
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

def ring_forward(q, k, v, at, cp):
    both = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(cp.size)]
        dist.all_gather(parts, x, group=cp.group)
        both.append(torch.cat(parts, 1))
    return piece(q, *both, at[cp.rank], torch.cat(at))


