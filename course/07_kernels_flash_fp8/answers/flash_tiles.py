from labkit.answers import Edit

WRONG = [
    Edit("/ d**0.5", "", told="divided by sqrt(d)"),
    Edit(
        "torch.arange(start, start + cols) > at",
        "torch.arange(start, start + cols) < -1",
        told="inside of a block too",
    ),
    Edit(
        "torch.arange(start, start + cols) > at",
        "torch.arange(start, start + cols) < -1",
        ("range(0, first + rows, cols)", "range(0, s, cols)"),
        told="no later one",
    ),
    Edit("range(0, first + rows, cols)", "range(0, s, cols)", told="are enough"),
    Edit("o * shrink + p @ v", "o + p @ v", told="o was added up under the old maximum"),
    Edit("total * shrink + p", "total + p", told="l was added up under the old maximum"),
    Edit("total * shrink + p", "total + p", ("o * shrink", "o"), told="l and o were added up under the old maximum"),
    Edit("(top + total.log())", "total.log()", told="out is right, lse is wrong"),
    Edit("(top + total.log())", "(top * total.log())", told="out is right, lse is wrong"),
    Edit(
        "torch.exp(scores - higher), torch.exp(top - higher)",
        "torch.exp(scores), torch.ones(())",
        ("(top + total.log())", "total.log()"),
        told="subtract the largest score first",
    ),
    Edit("range(0, first + rows, cols)", "range(0, first + 1, cols)", told="wrong"),
    Edit("torch.arange(start, start + cols) > at", "torch.arange(start, start + cols) >= at"),
    Edit("torch.full((rows, 1), -torch.inf)", "torch.zeros(rows, 1)", told="m began at 0"),
    Edit("scores.amax(1, keepdim=True)", "scores.amax()", told="NaN | wrong"),
    Edit("o / total", "o", told="still to be divided by l"),
    Edit("/ d**0.5", "/ d", told="not by d"),
    Edit("> at, -torch.inf)", "> at, -1e4)", told="-1e4 is no -∞"),
    # 2 blocks of keys at most
    Edit("range(0, first + rows, cols)", "[*range(0, first + rows, cols)][-2:]"),
    # keys once for all
    # K and V are loaded once, and stay
    Edit(
        'def flash_tiles(memory, s: int, d: int, rows: int, cols: int) -> None:\n    """Causal attention of q, k, v [s, d] in memory -> out [s, d] and lse [s] in memory."""',
        """def flash_tiles(memory, s, d, rows, cols):
    K, V = memory.load("k", 0, s), memory.load("v", 0, s)""",
        (
            'memory.load("k", start, start + cols), memory.load("v", start, start + cols)',
            "K[start : start + cols], V[start : start + cols]",
        ),
        told="predicted | room",
    ),
]

RIGHT = [
    Edit(
        "for start in range(0, first + rows, cols):",
        "for start in [c for c in range(0, s, cols) if c < first + rows]:",
    ),
]


# %% right: merged pieces: each block of keys is a small attention
import torch
import torch.distributed as dist
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load('q', a, a + rows)
        out, lse = torch.zeros(rows, d), torch.full((rows,), -torch.inf)
        for b in range(0, a + rows, cols):
            S = memory.load('k', b, b + cols) @ q.T / d ** .5
            hide = torch.arange(b, b + cols)[:, None] > torch.arange(a, a + rows)
            S = S.masked_fill(hide, -torch.inf).T
            l = torch.logsumexp(S, 1)
            new = torch.logaddexp(lse, l)
            p = torch.exp(S - new[:, None].nan_to_num(neginf=0.0))
            out = out * torch.exp(lse - new.nan_to_num(neginf=0.0))[:, None] + p @ memory.load('v', b, b + cols)
            lse = new
        memory.store('out', a, a + rows, out)
        memory.store('lse', a, a + rows, lse)


# %% right: from the last block of queries to the first, blocks of keys backwards, base two
import torch
import torch.distributed as dist
import math
def flash_tiles(memory, s, d, rows, cols):
    for a in reversed(range(0, s, rows)):
        q = memory.load('q', a, a + rows) * (math.log2(math.e) / d ** .5)
        m, l, o = torch.full((rows, 1), -1e30), 0.0, 0.0
        for b in reversed(range(0, a + rows, cols)):
            k, v = (memory.load(n, b, b + cols) for n in 'kv')
            seen = torch.arange(a, a + rows)[:, None] >= torch.arange(b, b + cols)
            S = torch.where(seen, q @ k.T, -torch.inf)
            n = torch.maximum(m, S.amax(1, True))
            p, c = torch.exp2(S - n), torch.exp2(m - n)
            l, o, m = l * c + p.sum(1, True), o * c + p @ v, n
        memory.store('out', a, a + rows, o / l)
        memory.store('lse', a, a + rows, ((m + torch.log2(l)) / math.log2(math.e)).flatten())


# %% right: NumPy, and one row of m, l a query
import numpy as np
import torch


def flash_tiles(memory, s, d, rows, cols):
    for i in range(s // rows):
        q = memory.load("q", i * rows, (i + 1) * rows).numpy() / np.sqrt(d)
        m, l, o = np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, d))
        for j in range(-(-(i + 1) * rows // cols)):
            k, v = (memory.load(name, j * cols, (j + 1) * cols).numpy() for name in ("k", "v"))
            S = np.where(np.arange(j * cols, (j + 1) * cols) <= np.arange(i * rows, (i + 1) * rows)[:, None], q @ k.T, -np.inf)
            new = np.maximum(m, S.max(1))
            p = np.exp(S - new[:, None])
            l, o, m = l * np.exp(m - new) + p.sum(1), o * np.exp(m - new)[:, None] + p @ v, new
        memory.store("out", i * rows, (i + 1) * rows, torch.tensor(o / l[:, None], dtype=torch.float32))
        memory.store("lse", i * rows, (i + 1) * rows, torch.tensor(m + np.log(l), dtype=torch.float32))


# %% right: einsum, keys turned round, whole blocks without a mask
import torch


def block(q, k, v, state, hide=None):
    m, l, o = state
    S = torch.einsum("id,jd->ij", q, k)
    if hide is not None:
        S.masked_fill_(hide, float("-inf"))
    new = torch.maximum(m, S.max(1).values)
    p = (S - new[:, None]).exp()
    c = (m - new).exp()
    return new, l.mul(c).add(p.sum(1)), o.mul(c[:, None]).addmm(p, v)


def flash_tiles(memory, s, d, rows, cols):
    for a in range(s - rows, -1, -rows):
        q = memory.load("q", a, a + rows).mul(d**-0.5)
        state = q.new_full((rows,), -1e30), q.new_zeros(rows), q.new_zeros(rows, d)
        for b in range(0, a + rows, cols):
            v, k = memory.load("v", b, b + cols), memory.load("k", b, b + cols)
            hide = None
            if b + cols > a + 1:
                hide = torch.arange(b, b + cols)[None] > torch.arange(a, a + rows)[:, None]
            state = block(q, k, v, state, hide)
        m, l, o = state
        memory.store("lse", a, a + rows, m + l.log())
        memory.store("out", a, a + rows, o / l.unsqueeze(1))


# %% right: lse as the state: logsumexp and logaddexp
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        lse = torch.full((rows,), -torch.inf)
        o = torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            k = memory.load("k", b, b + cols)
            v = memory.load("v", b, b + cols)
            S = (q @ k.T) / d**0.5
            S = torch.where(torch.arange(b, b + cols)[None] > torch.arange(a, a + rows)[:, None], torch.tensor(-torch.inf), S)
            one = S.logsumexp(-1)
            new = torch.logaddexp(lse, one)
            o = o * (lse - new).exp()[:, None] + (S - new[:, None]).exp() @ v
            lse = new
        memory.store("out", a, a + rows, o)
        memory.store("lse", a, a + rows, lse)


# %% wrong: all keys at once
# told: room
import torch
import torch.distributed as dist
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q, K, V = memory.load('q', a, a + rows), [], []
        for b in range(0, a + rows, cols):
            K.append(memory.load('k', b, b + cols)); V.append(memory.load('v', b, b + cols))
        S = (q @ torch.cat(K).T / d ** .5)
        S = S.masked_fill(torch.arange(S.shape[1]) > torch.arange(a, a + rows)[:, None], -torch.inf)
        memory.store('out', a, a + rows, S.softmax(1) @ torch.cat(V))
        memory.store('lse', a, a + rows, S.logsumexp(1))


# %% wrong: all on the chip
# told: predicted | room
# dense, from one load of everything
import torch


def flash_tiles(memory, s, d, rows, cols):
    q, k, v = (memory.load(name, 0, s) for name in "qkv")
    S = (q @ k.T / d**0.5).masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
    memory.store("out", 0, s, S.softmax(1) @ v)
    memory.store("lse", 0, s, S.logsumexp(1))


# %% wrong: dense row by row
# told: room
# the tiles are gathered, and each query is done against all of its keys
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q, K, V = memory.load("q", a, a + rows), [], []
        for b in range(0, a + rows, cols):
            K.append(memory.load("k", b, b + cols))
            V.append(memory.load("v", b, b + cols))
        K, V = torch.cat(K), torch.cat(V)
        out, lse = [], []
        for i in range(rows):
            S = K[: a + i + 1] @ q[i] / d**0.5
            out.append(S.softmax(0) @ V[: a + i + 1])
            lse.append(S.logsumexp(0))
        memory.store("out", a, a + rows, torch.stack(out))
        memory.store("lse", a, a + rows, torch.stack(lse))


# %% wrong: divides at every block
# told: divide at the end
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax(1, keepdim=True))
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            o = o / l
            m = new
        memory.store("out", a, a + rows, o)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))


# %% wrong: hidden scores are zero
# told: e^0 is 1
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], 0.0)
            new = torch.maximum(m, S.amax(1, keepdim=True))
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))


# %% wrong: keys remembered
# told: predicted | room
# a cache of tiles, filled by the first block of queries that needs them
import functools
import torch


def flash_tiles(memory, s, d, rows, cols):
    load = functools.cache(memory.load)
    for a in range(0, s, rows):
        q = load("q", a, a + rows)
        o, lse = torch.zeros(rows, d), torch.full((rows,), -torch.inf)
        for b in range(0, a + rows, cols):
            S = q @ load("k", b, b + cols).T / d**0.5
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -torch.inf)
            new = torch.logaddexp(lse, S.logsumexp(1))
            at = new.nan_to_num(neginf=0.0)[:, None]
            o, lse = o * (lse[:, None] - at).exp() + (S - at).exp() @ load("v", b, b + cols), new
        memory.store("out", a, a + rows, o)
        memory.store("lse", a, a + rows, lse)


# %% wrong: loads a part of a block
# told: a block of keys is loaded whole
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, min(b + cols, a + rows)).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, min(b + cols, a + rows)) > torch.arange(a, a + rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax(1, keepdim=True))
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, min(b + cols, a + rows))
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))


# %% wrong: mask of places in the tile
# told: by its place in the sequence
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(cols) > torch.arange(rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax(1, keepdim=True))
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))


# %% wrong: one maximum for a block
# told: one number for a whole block
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax())
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))


# %% wrong: out in the large memory
# told: is loaded | are stored
# o and lse go back to the large memory after each block of keys
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        memory.store("out", a, a + rows, torch.zeros(rows, d))
        memory.store("lse", a, a + rows, torch.full((rows,), -torch.inf))
        for b in range(0, a + rows, cols):
            o, lse = memory.load("out", a, a + rows), memory.load("lse", a, a + rows)
            S = q @ memory.load("k", b, b + cols).T / d**0.5
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -torch.inf)
            new = torch.logaddexp(lse, S.logsumexp(1))
            at = new.nan_to_num(neginf=0.0)[:, None]
            memory.store("out", a, a + rows, o * (lse[:, None] - at).exp() + (S - at).exp() @ memory.load("v", b, b + cols))
            memory.store("lse", a, a + rows, new)


# %% wrong: query by query
# told: are enough
# every query is a block of its own
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(s):
        q = memory.load("q", a, a + 1)
        top, total, o = torch.full((1, 1), -torch.inf), torch.zeros(1, 1), torch.zeros(1, d)
        for b in range(0, a + 1, cols):
            k, v = memory.load("k", b, b + cols), memory.load("v", b, b + cols)
            S = (q @ k.T / d**0.5).masked_fill(torch.arange(b, b + cols) > a, -torch.inf)
            higher = torch.maximum(top, S.amax(1, keepdim=True))
            p, shrink = torch.exp(S - higher), torch.exp(top - higher)
            total, o, top = total * shrink + p.sum(1, keepdim=True), o * shrink + p @ v, higher
        memory.store("out", a, a + 1, o / total)
        memory.store("lse", a, a + 1, (top + total.log())[0])


# %% wrong: scores in a list
# told: room
# the scores of a row of blocks are kept, tile by tile, until their softmax is known
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q, S, V = memory.load("q", a, a + rows), [], []
        for b in range(0, a + rows, cols):
            one = q @ memory.load("k", b, b + cols).T / d**0.5
            S.append(one.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -torch.inf))
            V.append(memory.load("v", b, b + cols))
        lse = torch.full((rows,), -torch.inf)
        for one in S:
            lse = torch.logaddexp(lse, one.logsumexp(1))
        memory.store("out", a, a + rows, sum((one - lse[:, None]).exp() @ v for one, v in zip(S, V)))
        memory.store("lse", a, a + rows, lse)


# %% wrong: shrinks the wrong way
# told: inf times 0
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax(1, keepdim=True))
            P = torch.exp(S - new)
            shrink = torch.exp(new - m)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))


# %% wrong: state goes on
# told: go on from one block of queries to the next
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax(1, keepdim=True))
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))
