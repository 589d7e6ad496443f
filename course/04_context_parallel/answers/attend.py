from labkit.answers import Edit, Same

_BEGIN = "    top = q.new_full"
_HIDDEN = ".masked_fill(at > q_at[:, None], -torch.inf)"
_SHRINKS = "When the maximum grows, what was summed before shrinks by exp(m_old - m_new): l, and O as well."
_OVERFLOWS = (
    "exp overflows for a large score and is 0 for a very negative one: subtract the running maximum, which begins "
    "at -inf."
)
_EPSILON = (
    "A small number added to l changes every out, and in float64 it shows. Put another number in place of l only where "
    "l is 0."
)
_OWN = (
    "You take one maximum for several queries. Where another query's scores are far larger, all of a row's exp(S - m) "
    "are 0: each row has its own."
)

WRONG = [
    Edit(" / q.shape[-1] ** 0.5", "", mistake="The scores are divided by sqrt(d)."),
    Edit(_HIDDEN, "", ("if at.min() > q_at.max():", "if False:"),
         mistake="A query at place i sees keys at places j <= i only."),
    Edit(_BEGIN, f"    q_at, k_at = torch.arange(q.shape[1]), torch.arange(k.shape[1])\n{_BEGIN}",
         mistake="The mask compares the places q_at and k_at, not the numbers of rows and columns."),
    Edit(_HIDDEN, _HIDDEN.replace(">", ">="), mistake="A query also sees the key at its own place: j <= i."),
    Edit(_HIDDEN, _HIDDEN.replace("-torch.inf", "0.0"),
         mistake="A hidden key has the score 0 here, and e^0 = 1 counts. Its score must be -inf."),
    Edit("out / total.masked_fill(total == 0, 1.0)", "out",
         mistake="out is O: the end of the calculation, O / l, is missing."),
    Edit("(top + total.log())", "total.log()", mistake="out is right; lse = m + log l, and m is missing."),
    Edit("total * shrink", "total", ("out * shrink", "out"), mistake=_SHRINKS),
    Edit("out * shrink", "out", mistake=_SHRINKS),
    Edit("torch.maximum(top, scores.amax(-1, keepdim=True))", "torch.zeros_like(top)", mistake=_OVERFLOWS),
    Edit("new_full((*q.shape[:2], 1), -torch.inf)", "new_zeros((*q.shape[:2], 1))", mistake=_OVERFLOWS),
    Edit("higher.masked_fill(higher == -torch.inf, 0.0)", "higher",
         mistake="A query that sees nothing of the blocks so far has m = -inf, and -inf minus -inf is no number: it "
         "becomes "
         "NaN and stays NaN."),
    Edit("total.masked_fill(total == 0, 1.0)", "total",
         mistake="A query that sees nothing has l = 0, and 0 / 0 is no number. Its out is 0."),
    Edit(_HIDDEN, _HIDDEN.replace("-torch.inf", "-1e9"),
         mistake="-1e9 is a score: a query that sees nothing then averages what is hidden. Use -inf."),
    Edit("if at.min() > q_at.max():", "if at.max() > q_at.max():",
         mistake="You skip blocks of which some keys are seen. Skip one only if *all* of it is hidden."),
    Edit("if at.min() > q_at.max():", "if at.min() > q_at.min():",
         mistake="You skip blocks that some queries see. Skip one only if *no* query sees any of it."),
    Edit("if at.min() > q_at.max():", "if at[0] > q_at.max():"),
    Edit("if at.min() > q_at.max():", "if at.min() > q_at[-1]:"),
    Edit("if at.min() > q_at.max():", "if at.min() >= q_at.max():"),
    Edit("if at.min() > q_at.max():", "if False:", told="a block that no query sees was read"),
    Edit("continue", "break",
         mistake="You stop at the first block that no query sees. Places come in any order: later blocks may be seen."),
    Edit("total.masked_fill(total == 0, 1.0)", "(total + 1e-6)", ("(top + total.log())", "(top + (total + 1e-6).log())"),
         mistake=_EPSILON),
    Edit("total.masked_fill(total == 0, 1.0)", "(total + 1e-6)", mistake=_EPSILON),
    Edit(_BEGIN, f"    block = 3\n{_BEGIN}", told="which is `block` here"),
    Edit(_BEGIN, f"    m = len(k_at) // block * block\n    k, v, k_at = k[:, :m], v[:, :m], k_at[:m]\n{_BEGIN}"),
    Edit(_BEGIN, f"    q_at = q_at.sort().values\n{_BEGIN}"),
    Edit(_BEGIN, f"    q /= q.shape[-1] ** 0.5\n{_BEGIN}", ("mT / q.shape[-1] ** 0.5", "mT"),
         told="changes its input `q`"),
    Edit(_BEGIN, f"    k_at -= q_at.max()\n    q_at -= q_at.max()\n{_BEGIN}", told="changes its input"),
    # float32 inside, whatever came
    Edit(_BEGIN, f"    dtype, q, k, v = q.dtype, q.float(), k.float(), v.float()\n{_BEGIN}",
         ("1.0), (top + total.log()).squeeze(-1)", "1.0).to(dtype), (top + total.log()).squeeze(-1).to(dtype)"),
         ("return out /", "return out.to(dtype) /"), told="out is wrong"),
    # queries that see nothing have lse 0
    Edit("(top + total.log())", "torch.where(total == 0, 0.0, top + total.log())"),
    Edit("out * shrink + p @ values, higher", "(out * shrink + p @ values) / total.clamp(min=1e-30), higher",
         ("return out / total.masked_fill(total == 0, 1.0)", "return out")),
    Edit("amax(-1, keepdim=True)", "amax((-2, -1), keepdim=True).expand_as(top)", mistake=_OWN),
    Edit("scores.amax(-1, keepdim=True)", "scores.amax()", mistake=_OWN),
]

EQUIVALENT = [
    Same("line 9: `ones_like` for `zeros_like`", "what stood there shrinks to nothing at the first visible block"),
    Same("line 18: 2.0 for 1.0", "0 is divided by it"),
]


# %% right: merged pieces: a block is a small attention
import torch

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


# %% wrong: all scores at once
# told: half of one head's scores
import torch

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


# %% wrong: the mean of the blocks' softmaxes
# mistake: This is the mean of the blocks' results. Each block counts with its share of the sum over the whole row.
import torch

def attend(q, k, v, q_at, k_at, block):
    out, lse, seen = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf), 0
    for i in range(0, k.shape[1], block):
        at = k_at[i : i + block]
        if at.min() > q_at.max():
            continue
        s = (q @ k[:, i : i + block].mT / q.shape[-1] ** 0.5).masked_fill(at > q_at[:, None], -torch.inf)
        out = out + s.softmax(-1).nan_to_num(0.0) @ v[:, i : i + block]
        lse, seen = torch.logaddexp(lse, s.logsumexp(-1)), seen + 1
    return out / max(seen, 1), lse
