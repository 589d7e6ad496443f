from labkit.answers import Edit, Same

_JOINS = "before, whole = join(come, before), join(come, whole)"
_STEPS = "        step *= 2\n"
_LOOP = "    while step < cp.size:"

WRONG = [
    Edit("return before[:, 1:]", "return whole[:, 1:]",
         mistake="This is the state after the rank's own piece. Asked is the state before it."),
    Edit(_JOINS, "before, whole = join(before, come), join(whole, come)",
         mistake="The order is exchanged: what comes from an earlier rank is the first piece, this rank's the second."),
    Edit(_JOINS, "before, whole = join(before, come), join(come, whole)",
         mistake="What comes is earlier than all that `before` holds: it is the first piece of the two."),
    Edit(_JOINS, "before = join(come, before)",
         mistake="You send your own pair in every round. Send what you have joined so far, which covers more ranks each time."),
    Edit(_JOINS, "before, whole = join(come, before), torch.cat([whole[:, :1], join(come, whole)[:, 1:]], 1)",
         mistake="The decay that goes on is the product of both pieces' decays, too: d₂ d₁."),
    Edit("d * first[:, 1:] + u", "first[:, 1:] + u",
         mistake="What earlier ranks wrote fades through the later pieces: d₂ u₁ + u₂."),
    Edit("[d * first[:, :1],", "[d,",
         mistake="The decay of two pieces is the product of both: d₂ d₁."),
    Edit("before[:, 0] = 1.0", "before[:, 0] = decay",
         mistake="Nothing lies before rank 0's piece: the pair to begin with is d = 1, u = 0."),
    Edit("group_dst=cp.rank + step", "group_dst=cp.rank + step", (_LOOP, "    if step < cp.size:"), (_STEPS, ""),
         mistake="After one round a rank knows its neighbour's pair alone. Go on, twice as far each time."),
    Edit("isend(whole,", "isend(before,", told="expected"),
    Edit("return before[:, 1:].reshape(own.shape)",
         "return ((whole[:, 1:] - own.flatten(1)) / decay[:, None]).reshape(own.shape)",
         mistake="What has faded to 0 cannot be divided back. Keep what is before the rank apart from what is after it."),
    Edit("            works.append(dist.irecv(come, group=cp.group, group_src=cp.rank - step))\n",
         "            dist.irecv(come, group=cp.group, group_src=cp.rank - step)\n", told="never waits"),
    Edit("group=cp.group, group_dst=cp.rank + step", "dst=cp.rank + step",
         ("group=cp.group, group_src=cp.rank - step", "src=cp.rank - step"), told="smaller than the world | part of the world"),
]

EQUIVALENT = [
    Same("line 18: `<=` for `<`", "with that step no rank has a partner"),
    Same("line 23: `group_src` dropped", "gloo takes what was sent first, and that is the message of this round"),
]


# %% right: state and decay in two messages
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    d, u = decay.clone(), own.clone()
    before, some, step = torch.zeros_like(own), torch.ones_like(decay), 1
    while step < cp.size:
        sent, got = [], []
        if cp.rank >= step:
            got = [torch.empty(t.shape, dtype=t.dtype) for t in (d, u)]
            sent += [dist.irecv(t, group=cp.group, group_src=cp.rank - step) for t in got]
        if cp.rank + step < cp.size:
            sent += [dist.isend(t.contiguous(), group=cp.group, group_dst=cp.rank + step) for t in (d, u)]
        for one in sent:
            one.wait()
        if got:
            before = before + some[:, None, None] * got[1]
            u = u + d[:, None, None] * got[1]
            some, d = some * got[0], d * got[0]
        step += step
    return before


# %% right: partners that exchange the pair of their block
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    flat = own.reshape(len(decay), -1)
    block = torch.cat([decay.unsqueeze(1), flat], 1)
    before = torch.cat([torch.ones_like(block[:, :1]), torch.zeros_like(flat)], 1)
    after = lambda a, b: torch.cat([a[:, :1] * b[:, :1], b[:, :1] * a[:, 1:] + b[:, 1:]], 1)
    step = 1
    while step < cp.size:
        other = cp.rank ^ step
        if other < cp.size:
            come = torch.empty_like(block)
            works = [dist.isend(block, group=cp.group, group_dst=other), dist.irecv(come, group=cp.group, group_src=other)]
            [work.wait() for work in works]
            if other < cp.rank:
                before, block = after(come, before), after(come, block)
            else:
                block = after(block, come)
        step *= 2
    return before[:, 1:].reshape_as(own)


# %% right: batch_isend_irecv, global ranks
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    n = own[0].numel()
    pair = torch.cat([own.flatten(1), decay[:, None]], 1)
    nothing = torch.zeros_like(pair)
    nothing[:, n] = 1
    for k in range((cp.size - 1).bit_length()):
        hop, come, asked = 1 << k, torch.empty_like(pair), []
        if cp.rank + hop < cp.size:
            asked.append(dist.P2POp(dist.isend, pair, cp.ranks[cp.rank + hop], group=cp.group))
        if cp.rank - hop >= 0:
            asked.append(dist.P2POp(dist.irecv, come, cp.ranks[cp.rank - hop], group=cp.group))
        for work in dist.batch_isend_irecv(asked) if asked else []:
            work.wait()
        if cp.rank >= hop:
            joined = []
            for later in (nothing, pair):
                joined.append(torch.cat([later[:, n:] * come[:, :n] + later[:, :n], later[:, n:] * come[:, n:]], 1))
            nothing, pair = joined
    return nothing[:, :n].reshape(own.shape)


# %% right: sends first, a receive that blocks, decays as wide as the state
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    d, u = decay, own
    so_far, left = torch.zeros_like(own), torch.ones_like(decay)
    reach = 1
    while reach < cp.size:
        out = None
        if cp.rank + reach < cp.size:
            message = torch.cat([u.reshape(-1), d])
            out = dist.isend(message, group=cp.group, group_dst=cp.rank + reach)
        if cp.rank >= reach:
            come = own.new_empty(own.numel() + len(decay))
            dist.recv(come, group=cp.group, group_src=cp.rank - reach)
            theirs, faded = come[: own.numel()].view(own.shape), come[own.numel() :]
            so_far, left = left.view(-1, 1, 1) * theirs + so_far, left * faded
            u, d = d.view(-1, 1, 1) * theirs + u, d * faded
        if out is not None:
            out.wait()
        reach *= 2
    return so_far


# %% wrong: rank by rank
# told: stand one behind the other
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    h = torch.zeros_like(own)
    if cp.rank:
        dist.recv(h, group=cp.group, group_src=cp.rank - 1)
    if cp.rank + 1 < cp.size:
        dist.send((decay[:, None, None] * h + own).contiguous(), group=cp.group, group_dst=cp.rank + 1)
    return h


# %% wrong: an all-gather
# told: it calls all_gather
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    pair = torch.cat([decay[:, None], own.flatten(1)], 1)
    every = [torch.empty_like(pair) for _ in range(cp.size)]
    dist.all_gather(every, pair, group=cp.group)
    h = torch.zeros_like(own)
    for one in every[: cp.rank]:
        h = one[:, 0, None, None] * h + one[:, 1:].view_as(own)
    return h


# %% wrong: each sends its pair to all later ranks
# told: a state and its decays a round
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    pair = torch.cat([decay[:, None], own.flatten(1)], 1)
    every = [torch.empty_like(pair) for _ in range(cp.rank)]
    works = [dist.isend(pair, group=cp.group, group_dst=to) for to in range(cp.rank + 1, cp.size)]
    works += [dist.irecv(come, group=cp.group, group_src=i) for i, come in enumerate(every)]
    for work in works:
        work.wait()
    h = torch.zeros_like(own)
    for one in every:
        h = one[:, 0, None, None] * h + one[:, 1:].view_as(own)
    return h


# %% wrong: all pairs moved by one rank first
# told: a state and its decays a round | stand one behind the other
import torch
import torch.distributed as dist

def state_before(decay, own, cp):
    def moved(pair, hop):
        works, come = [], torch.empty_like(pair)
        if cp.rank + hop < cp.size:
            works.append(dist.isend(pair, group=cp.group, group_dst=cp.rank + hop))
        if cp.rank >= hop:
            works.append(dist.irecv(come, group=cp.group, group_src=cp.rank - hop))
        for work in works:
            work.wait()
        return come

    pair = moved(torch.cat([decay[:, None], own.flatten(1)], 1), 1)
    if cp.rank == 0:
        pair.zero_()
        pair[:, 0] = 1
    step = 1
    while step < cp.size - 1:
        come = moved(pair, step)
        if cp.rank >= step:
            pair = torch.cat([pair[:, :1] * come[:, :1], pair[:, :1] * come[:, 1:] + pair[:, 1:]], 1)
        step *= 2
    return pair[:, 1:].reshape(own.shape)
