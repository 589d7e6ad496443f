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


