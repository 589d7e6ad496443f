from labkit.answers import Edit, Same

WRONG = [
    Edit("(*q.shape[:2], 1), -torch.inf)", "(*q.shape[:2], 1), -1e4)", mistake="-1e9 is a score: a query that sees nothing then averages what is hidden. Use -inf."),
    Edit(" / q.shape[-1] ** 0.5", "", mistake="The scores are divided by sqrt(d)."),
    Edit(
        ".masked_fill(at > q_at[:, None], -torch.inf)",
        "",
        ("if at.min() > q_at.max():", "if False:"),
        mistake="A query at place i sees keys at places j <= i only.",
    ),
    Edit("total * shrink", "total", ("out * shrink", "out"), mistake="When the maximum grows, what was summed before shrinks by exp(m_old - m_new)."),
    Edit("out * shrink", "out", mistake="When the maximum grows, O shrinks by exp(m_old - m_new) as l does."),
    Edit(
        """        if at.min() > q_at.max():
            continue
""",
        "",
        mistake="A block that no query sees is skipped, not computed and masked: it may hold NaN, and 0 times NaN" " is NaN.",
    ),
    Edit("total.masked_fill(total == 0, 1.0)", "total", mistake="A query that sees nothing: -inf minus -inf and 0 / 0 are no numbers. Its out is 0."),
    Edit(
        "    top = q.new_full",
        """    block = 3
    top = q.new_full""",
        told="which is `block` here",
    ),
    # row by row, all keys of a row at once
    Edit(
        "    top = q.new_full",
        """    if len(q_at) > 1:
        rows = [attend(q[:, i : i + 1], k, v, q_at[i : i + 1], k_at, block * len(q_at)) for i in range(len(q_at))]
        return torch.cat([out for out, _ in rows], 1), torch.cat([lse for _, lse in rows], 1)
    top = q.new_full""",
        told="which is `block` here",
    ),
    # float32 inside, whatever came
    Edit(
        "    top = q.new_full",
        """    dtype, q, k, v = q.dtype, q.float(), k.float(), v.float()
    top = q.new_full""",
        (
            "return out / total.masked_fill(total == 0, 1.0), (top + total.log()).squeeze(-1)",
            """out = out / total.masked_fill(total == 0, 1.0)
    return out.to(dtype), (top + total.log()).squeeze(-1).to(dtype)""",
        ),
        told="out is wrong",
    ),
    Edit("q_at[:, None], -torch.inf)", "q_at[:, None], -1e9)", mistake="-1e9 is a score: a query that sees nothing then averages what is hidden. Use -inf."),
    # blind queries have lse zero
    Edit(
        "top = q.new_full((*q.shape[:2], 1), -torch.inf)",
        """top = q.new_full((*q.shape[:2], 1), -torch.inf)
    finite = torch.zeros_like(top)""",
        ("top + total", "finite + total.masked_fill(total == 0, 1.0)"),
    ),
    # block of queries too
    Edit(
        "total, out = torch.zeros_like(top), torch.zeros_like(q)",
        """total, out = torch.zeros_like(top), torch.zeros_like(q)
    q_at = q_at.sort().values""",
    ),
    # changes q
    Edit(
        'def attend(\n    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_at: torch.Tensor, k_at: torch.Tensor, block: int\n) -> tuple[torch.Tensor, torch.Tensor]:\n    """q [a, n, d] at places q_at [n], k and v [a, m, d] at k_at [m] -> out [a, n, d], lse [a, n]."""',
        """def attend(q, k, v, q_at, k_at, block):
    q /= q.shape[-1] ** 0.5""",
        ("mT / q.shape[-1] ** 0.5", "mT"),
    ),
    # changes the places
    Edit(
        'def attend(\n    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_at: torch.Tensor, k_at: torch.Tensor, block: int\n) -> tuple[torch.Tensor, torch.Tensor]:\n    """q [a, n, d] at places q_at [n], k and v [a, m, d] at k_at [m] -> out [a, n, d], lse [a, n]."""',
        """def attend(q, k, v, q_at, k_at, block):
    k_at -= q_at.max()
    q_at -= q_at.max()""",
    ),
    # divides after every block
    Edit(
        """total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values, higher
    return out / total.masked_fill(total == 0, 1.0), (top + total.log()).squeeze(-1)""",
        """total = total * shrink + p.sum(-1, keepdim=True)
        out = (out * shrink + p @ values) / total.masked_fill(total == 0, 1.0)
        top = higher
    return out, (top + total.log()).squeeze(-1)""",
        mistake="O is divided by l after every block. Until the last block neither of the two is final.",
    ),
    Edit(
        """p, shrink = torch.exp(scores - finite), torch.exp(top - finite)
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values, higher""",
        """p, grow = torch.exp(scores - finite), torch.exp(finite - top).masked_fill(top == -torch.inf, 0.0)
        total, out, top = total * grow + p.sum(-1, keepdim=True), out * grow + p @ values, higher""",
        mistake="What was summed before grows instead of shrinking: its factor is exp(m_old - m_new), at most 1.",
    ),
    # hides its own place
    Edit(
        "if at.min() > q_at.max():",
        "if at.min() >= q_at.max():",
        ("at > q_at[:, None]", "at >= q_at[:, None]"),
        mistake="A query also sees the key at its own place: j <= i.",
    ),
    # last partial block lost
    Edit(
        "total, out = torch.zeros_like(top), torch.zeros_like(q)",
        """total, out = torch.zeros_like(top), torch.zeros_like(q)
    m = k.shape[1] // block * block
    k, v, k_at = k[:, :m], v[:, :m], k_at[:m]""",
        mistake="The last block may be shorter than the others: its keys are missing.",
    ),
    # lse without the maximum
    Edit(
        "masked_fill(total == 0, 1.0), (top + total.log())",
        "masked_fill(total == 0, 1.0), total.log()",
        mistake="out is right; lse = m + log l, and m is missing.",
    ),
    # maximum of all rows
    Edit("amax(-1, keepdim=True)", "amax((-2, -1), keepdim=True).expand_as(top)"),
    # maximum starts at zero
    Edit("new_full((*q.shape[:2], 1), -torch.inf)", "new_zeros((*q.shape[:2], 1))", mistake="exp overflows for a large score and is 0 for a very negative one: subtract the running maximum " "first; it begins at -inf."),
    # only the first two blocks rescaled
    Edit(
        "total, out = torch.zeros_like(top), torch.zeros_like(q)",
        """total, out = torch.zeros_like(top), torch.zeros_like(q)
    first = True""",
        (
            "total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values, higher",
            """total, out, top = total * shrink + p.sum(-1, keepdim=True), (out * shrink if first else out) + p @ values, higher
        first = False""",
        ),
    ),
    # out not divided
    Edit("out / total.masked_fill(total == 0, 1.0)", "out", mistake="out is O: the end of the calculation, O / l, is missing."),
    # skips by the first place
    Edit("if at.min() > q_at.max():", "if at[0] > q_at.max():", mistake="A block is skipped by its *lowest* place: places need not ascend, at[0] may be any of them."),
    # skips by the last query
    Edit("if at.min() > q_at.max():", "if at.min() > q_at[-1]:", mistake="A block is skipped when even the query at the *highest* place sees none of it; the last need not" " be that one."),
    # skips one place early
    Edit("if at.min() > q_at.max():", "if at.min() >= q_at.max():"),
    # skips what is partly hidden
    Edit("if at.min() > q_at.max():", "if at.max() > q_at.max():", mistake="You skip blocks of which some keys are seen. Skip one only if *all* of it is hidden."),
    # skips what one query does not see
    Edit("if at.min() > q_at.max():", "if at.min() > q_at.min():", mistake="You skip blocks that some queries see. Skip one only if *no* query sees any of it."),
    # stops at the first hidden block
    Edit("continue", "break"),
]

EQUIVALENT = [
    Same("line 9: `ones_like` for `zeros_like`", "what stood there shrinks to nothing at the first visible block"),
    Same("line 18: 2.0 for 1.0", "0 is divided by it"),
]


# %% right: merged pieces: a block is a small attention
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
def attend(q, k, v, q_at, k_at, block):
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    for i in range(0, k.shape[1], block):
        c = slice(i, i + block)
        if (k_at[c] > q_at.max()).all():
            continue
        more, l = piece(q, k[:, c], v[:, c], q_at, k_at[c])
        t = torch.logaddexp(lse, l)
        f = t.nan_to_num(neginf=0.0)
        out, lse = out * (lse - f).exp()[..., None] + more * (l - f).exp()[..., None], t
    return out, lse


# %% right: two passes: first the maximum, then the sums, scores computed twice
import torch
def attend(q, k, v, q_at, k_at, block):
    parts = [slice(i, i + block) for i in range(0, k.shape[1], block)]
    parts = [c for c in parts if k_at[c].min() <= q_at.max()]
    S = lambda c: torch.where(k_at[c] <= q_at[:, None], q @ k[:, c].mT, torch.tensor(-torch.inf)) / q.shape[-1] ** 0.5
    m = q.new_full(q.shape[:2], -torch.inf)
    for c in parts:
        m = torch.maximum(m, S(c).amax(-1))
    f = m.nan_to_num(neginf=0.0)[..., None]
    l, o = torch.zeros_like(m), torch.zeros_like(q)
    for c in parts:
        p = (S(c) - f).exp()
        l, o = l + p.sum(-1), o + p @ v[:, c]
    return o / l.clamp_min(1e-30)[..., None], m + l.log()


# %% right: blocks from the last to the first, in float64; a list for an answer
import torch


def attend(q, k, v, q_at, k_at, block):
    top = torch.full((*q.shape[:2], 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(top), torch.zeros(q.shape, dtype=torch.float64)
    n = -(-k.shape[1] // block)
    for i in reversed(range(n)):
        cut = slice(i * block, (i + 1) * block)
        if not bool((k_at[cut][None, :] <= q_at[:, None]).any()):
            continue
        s = torch.bmm(q.double(), k[:, cut].double().transpose(1, 2)).div(q.shape[-1] ** 0.5)
        s[:, k_at[cut][None, :] > q_at[:, None]] = -torch.inf
        new = torch.maximum(top, s.max(-1, keepdim=True).values)
        safe = torch.where(new.isinf(), torch.zeros_like(new), new)
        out = out * (top - safe).exp() + (s - safe).exp() @ v[:, cut].double()
        total = total * (top - safe).exp() + (s - safe).exp().sum(-1, keepdim=True)
        top = new
    out = torch.where(total > 0, out / total, torch.zeros_like(out))
    return [out.to(q.dtype), (top + total.log())[..., 0].to(q.dtype)]


# %% right: only the rows that see something of the block
import torch


def attend(q, k, v, q_at, k_at, block):
    a, n, d = q.shape
    m = q.new_full((a, n), -torch.inf)
    l = q.new_zeros((a, n))
    o = q.new_zeros((a, n, v.shape[2]))
    for i in range(0, len(k_at), block):
        at = k_at[i : i + block]
        rows = torch.nonzero(q_at >= at.min()).squeeze(1)
        if len(rows) == 0:
            continue
        s = q[:, rows] @ k[:, i : i + block].mT / d**0.5
        s = s.masked_fill(at[None, None] > q_at[rows][None, :, None], -torch.inf)
        old = m[:, rows]
        new = torch.maximum(old, s.amax(2))
        p = torch.exp(s - new[:, :, None])
        c = torch.exp(old - new)
        l[:, rows] = l[:, rows] * c + p.sum(2)
        o[:, rows] = o[:, rows] * c[:, :, None] + p @ v[:, i : i + block]
        m[:, rows] = new
    return torch.where(l[..., None] > 0, o / l[..., None], o), m + l.log()


# %% wrong: blind in the first block
# mistake: A query that sees nothing of the blocks so far has m = -inf, and -inf minus -inf is no number: it becomes NaN and stays NaN.
import torch


def attend(q, k, v, q_at, k_at, block):
    a, n, d = q.shape
    m = q.new_full((a, n), -torch.inf)
    l = q.new_zeros((a, n))
    o = torch.zeros_like(q)
    for i in range(0, len(k_at), block):
        see = q_at[:, None] >= k_at[i : i + block][None]
        if not see.any():
            continue
        s = (q @ k[:, i : i + block].mT / d**0.5).masked_fill(~see, -torch.inf)
        new = torch.maximum(m, s.amax(2))
        p = torch.exp(s - new[..., None])
        c = torch.exp(m - new)
        l = l * c + p.sum(2)
        o = o * c[..., None] + p @ v[:, i : i + block]
        m = new
    return o / l[..., None], m + l.log()


# %% wrong: hidden scores are zero
# mistake: A hidden key has the score 0 here, and e^0 = 1 counts. Its score must be -inf.
import torch


def attend(q, k, v, q_at, k_at, block):
    a, n, d = q.shape
    m = q.new_full((a, n), -torch.inf)
    l = q.new_zeros((a, n))
    o = torch.zeros_like(q)
    for i in range(0, len(k_at), block):
        see = q_at[:, None] >= k_at[i : i + block][None]
        if not see.any():
            continue
        s = (q @ k[:, i : i + block].mT / d**0.5) * see
        new = torch.maximum(m, s.amax(2))
        p = torch.exp(s - new[..., None])
        c = torch.exp(m - new)
        l = l * c + p.sum(2)
        o = o * c[..., None] + p @ v[:, i : i + block]
        m = new
    return o / l[..., None], m + l.log()


# %% wrong: mask by index
# mistake: The mask compares the places q_at and k_at, not the numbers of rows and columns.
import torch


def attend(q, k, v, q_at, k_at, block):
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for i in range(0, k.shape[1], block):
        rows, cols = torch.arange(q.shape[1]), torch.arange(i, min(i + block, k.shape[1]))
        hidden = cols > rows[:, None]
        if hidden.all():
            continue
        s = (q @ k[:, cols].mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        total = torch.logaddexp(lse, torch.logsumexp(s, -1))
        ref = torch.where(total == -torch.inf, torch.zeros_like(total), total)
        out = out * (lse - ref).exp().unsqueeze(-1) + (s - ref.unsqueeze(-1)).exp() @ v[:, cols]
        lse = total
    return out, lse


# %% wrong: softmax of each block
# mistake: Each block has a softmax of its own here, and they are averaged: all blocks share one sum.
import torch


def attend(q, k, v, q_at, k_at, block):
    a, n, d = q.shape
    outs, lses = [], []
    for i in range(0, len(k_at), block):
        see = q_at[:, None] >= k_at[i : i + block][None]
        if not see.any():
            continue
        s = (q @ k[:, i : i + block].mT / d**0.5).masked_fill(~see, -torch.inf)
        outs.append(torch.nan_to_num(s.softmax(-1)) @ v[:, i : i + block])
        lses.append(s.logsumexp(-1))
    return torch.stack(outs).mean(0), torch.stack(lses).logsumexp(0)
# %% wrong: all scores at once
# told: half of one head's scores
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
def attend(q, k, v, q_at, k_at, block):
    return piece(q, k, v, q_at, k_at)


# %% wrong: in numpy all at once
# told: compute with torch
import numpy as np
import torch


def attend(q, k, v, q_at, k_at, block):
    seen = np.flatnonzero(k_at.numpy() <= q_at.numpy().max())
    keys, values, at = k.numpy()[:, seen], v.numpy()[:, seen], k_at.numpy()[seen]
    scores = q.numpy() @ keys.transpose(0, 2, 1) / np.sqrt(np.float32(q.shape[-1]))
    scores = np.where(at[None, :] > q_at.numpy()[:, None], -np.inf, scores)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = p @ values / np.where(total == 0, 1, total)
    return torch.from_numpy(out.astype(np.float32)), torch.from_numpy(lse.astype(np.float32))


