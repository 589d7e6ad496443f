from labkit.answers import Edit, Same

_NEGATIVE = "Python counts a negative index from the end"
_PIECE = "block[0], block[1], mine[rows], at[owner], half"
_MERGE = "out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)"
_HALVES = "(slice(0, half), slice(half, None))"
_WAIT = "        new = shift.wait() if shift else None\n"

WRONG = [
    Edit("range(cp.size):", "range(1):", mistake="That is this rank's own block alone. All blocks must come by."),
    Edit("block = shift.wait()", "shift.wait()",
         mistake="The same keys and values at every step: go on with what `wait()` returns."),
    Edit("Shift(block, cp)", "Shift(torch.stack((k, v)), cp)",
         mistake="You send your own block at every step. Send on the block that came."),
    Edit("mine = q.shape[1] // 2, at[cp.rank]", "mine = q.shape[1] // 2, torch.arange(q.shape[1])",
         ("at[owner]", "mine"),
         mistake="The mask needs places in the whole sequence: at[cp.rank] and at[owner]."),
    Edit("cp.rank - step", "cp.rank + step",
         mistake="The mask has the places of another rank: at step i the keys are those of rank (r - i) mod C."),
    Edit(_MERGE, "out[:, rows] += piece[0] / cp.size\n"
         "            lse[:, rows] = torch.logaddexp(lse[:, rows], piece[1])",
         mistake="Pieces are not averaged: merge them by their lse."),
    Edit(f"in {_HALVES}", f"in {_HALVES} if owner <= cp.rank else ()",
         mistake="Blocks of later ranks are not hidden: with zigzag your late half sees all of them."),
    Edit(_PIECE, "block[0, :, seen], block[1, :, seen], mine[rows], at[owner][seen], half",
         ("        for rows", "        seen = slice(half) if owner < cp.rank else slice(None)\n        for rows"),
         mistake="You skip the late half of every earlier rank's block. That is right for zigzag alone: compare the "
         "places in `at`."),
    Edit("        for rows", f"{_WAIT}        for rows", ("block = shift.wait()", "block = new"),
         told="Nothing is computed between sending and waiting"),
    # a product for show while the block travels
    Edit("        for rows",
         f"        for rows in {_HALVES}:\n            attend(q[:, rows], {_PIECE})\n{_WAIT}        for rows",
         ("block = shift.wait()", "block = new"), told="multiply-adds"),
    Edit(_HALVES, "(slice(None),)", (", half)\n", ", 2 * half)\n"), told="a block of n keys goes whole"),
    Edit(_HALVES, "(slice(None),)", told="only some of the queries of a call see"),
    Edit(", half)\n", ", 2 * half)\n", told="nothing is skipped where one half is seen"),
    Edit("if step < cp.size - 1 else None", "if True else None", told="C hops"),
    # every block that came stays alive
    Edit("            block = shift.wait()", "            block = shift.wait()\n            come.append(block)",
         ("    for step in range", "    come = [block]\n    for step in range"), told="eight blocks"),
    # gathers keys and values
    Edit("    block = torch.stack((k, v))\n",
         "    block = torch.stack((k, v))\n    every = [torch.empty_like(block) for _ in at]\n"
         "    torch.distributed.all_gather(every, block, group=cp.group)\n",
         ("Shift(block, cp) if step < cp.size - 1 else None", "None"), ("block[0], block[1]", "*every[owner]"),
         told="it calls all_gather"),
]

EQUIVALENT = [
    Same("line 12: rounded up for down", "2 divides a rank's tokens"),
    Same("line 13: `ones_like` for `zeros_like`", "with an lse of -inf it has no weight"),
    Same("line 17: `% cp.size` dropped", _NEGATIVE),
]


# %% right: own isends, K and V in two messages, own attention over the quarters of which something is seen
import torch
import torch.distributed as dist
from exercises.merge import merge

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

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


# %% right: each half of q by itself, joined and then merged
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift

def ring_forward(q, k, v, at, cp):
    half, mine, block, found = (q.shape[1] + 1) // 2, at[cp.rank], torch.stack((k, v)), None
    for step in range(cp.size):
        shift = Shift(block, cp) if step + 1 < cp.size else None
        owner = at[(cp.rank - step) % cp.size]
        early, late = (attend(rows, *block, to, owner, half) for rows, to in zip(q.split(half, 1), mine.split(half)))
        piece = torch.cat((early[0], late[0]), 1), torch.cat((early[1], late[1]), 1)
        found = piece if found is None else merge(*found, *piece)
        block = shift.wait() if shift else block
    return found


# %% wrong: a list of all blocks, each received into memory of its own
# told: eight blocks
import torch
import torch.distributed as dist
from exercises.attend import attend
from exercises.merge import merge

def ring_forward(q, k, v, at, cp):
    n, blocks = q.shape[1], [torch.stack((k, v))]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    for step in range(cp.size):
        works = []
        if step < cp.size - 1:
            works.append(dist.isend(blocks[-1], group=cp.group, group_dst=(cp.rank + 1) % cp.size))
            blocks.append(torch.empty_like(blocks[-1]))
            works.append(dist.irecv(blocks[-1], group=cp.group, group_src=(cp.rank - 1) % cp.size))
        for rows in (slice(0, n // 2), slice(n // 2, n)):
            piece = attend(q[:, rows], *blocks[step], at[cp.rank][rows], at[(cp.rank - step) % cp.size], n // 2)
            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)
        for work in works:
            work.wait()
    return out, lse


# %% wrong: all pieces kept, and joined at the end by one softmax of their lse
# told: eight blocks
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


# %% wrong: queries go round with out and lse, keys and values stay
# told: K and V are all that must travel
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift

def ring_forward(q, k, v, at, cp):
    half, n, lse = q.shape[1] // 2, q.shape[1], q.new_full((*q.shape[:2], 1), -torch.inf)
    guest = torch.cat((q, torch.zeros_like(q), lse), -1)
    for step in range(cp.size):
        owner, d = (cp.rank - step) % cp.size, q.shape[-1]
        asked, out, lse = guest[..., :d], guest[..., d : 2 * d], guest[..., -1]
        new = guest.clone()
        for rows in (slice(half), slice(half, n)):
            piece = attend(asked[:, rows].contiguous(), k, v, at[owner][rows], at[cp.rank], half)
            both = merge(out[:, rows], lse[:, rows], *piece)
            new[:, rows, d : 2 * d], new[:, rows, -1] = both
        guest = Shift(new, cp).wait()
    return guest[..., d : 2 * d].clone(), guest[..., -1].clone()
