from labkit.answers import Edit

_READ = 'read = a.exp()[..., None] * torch.einsum("hpn,ln->lhp", h, Cs)'
_WRITTEN = "((a[-1] - a).exp() * dts)[..., None] * xs"
_LAST = "a[-1].exp()[:, None, None] * h"
_PLUS = " + read)"

WRONG = [
    Edit(_PLUS, ")", mistake="What earlier chunks wrote is missing from y: a token reads it from the state at the border."),
    Edit("a.exp()[..., None] * torch.einsum", "torch.einsum",
         mistake="The state at the border fades inside the chunk, too: at token i e^(a_i) of it is left."),
    Edit("read = a.exp()", "read = (a - dts * A).exp()",
         mistake="The state has faded at the token that reads it, too: e^(a_i) has its own step in it."),
    Edit('"hpn,ln->lhp", h, Cs', '"hpn,ln->lhp", h, Bs', mistake="A token reads the state at its C, not at its B."),
    Edit(_LAST, "h", mistake="The state that was given fades through the whole chunk: e^(a_last) of it is left."),
    Edit(_LAST + " + ", "", mistake="You hand on what this chunk wrote alone. What was before it goes on, faded."),
    Edit("(a[-1] - a).exp() * dts", "dts",
         mistake="What a token wrote fades up to the end of the chunk: e^(a_last - a_j) of it is left."),
    Edit("(a[-1] - a).exp() * dts", "a.exp() * dts",
         mistake="e^(a_j) is what is left from the beginning to token j; it fades from j to the end: a_last - a_j."),
    Edit("((a[-1] - a).exp() * dts)", "(a[-1] - a).exp()",
         mistake="What a token writes is dt_j x_j B_j^T: dt counts in the state that is handed on, too."),
    Edit("(a[-1] - a).exp() * dts", "a[-1].exp() * (-a).exp() * dts",
         mistake="With strong decays e^(-a_j) overflows: subtract first, exp once."),
    Edit("range(0, len(x), size)", "range(0, len(x) - size + 1, size)",
         mistake="The last chunk may be shorter than `size`, and counts."),
    Edit("parts = []", "parts, h = [], torch.zeros_like(h)",
         mistake="The state before the first token is the argument h, and need not be zeros."),
    Edit("range(0, len(x), size)", "range(0, len(x), len(x))", ("start + size", "start + len(x)"),
         told="twice the weights within all chunks"),
    Edit('torch.einsum("lhp,ln->hpn", written, Bs)', "(written[..., None] * Bs[:, None, None]).sum(0)",
         told="twice the weights within all chunks"),
    Edit("range(0, len(x), size)", "range(0, len(x), 1)", ("start + size", "start + 1"), told="no loop over tokens"),
]


# %% right: all chunks at once, padded with dt 0, then the states one after the other
import torch
import torch.nn.functional as F

def chunked(x, dt, A, B, C, h, size):
    s = len(x)
    pad = -s % size
    x, dt = F.pad(x, (0, 0, 0, 0, 0, pad)), F.pad(dt, (0, 0, 0, pad))
    B, C = F.pad(B, (0, 0, 0, pad)), F.pad(C, (0, 0, 0, pad))
    x, dt, B, C = (t.unflatten(0, (-1, size)) for t in (x, dt, B, C))
    a = (dt * A).cumsum(1)
    seen = torch.ones(size, size).tril().bool()[..., None]
    left = (a[:, :, None] - a[:, None]).masked_fill(~seen, -torch.inf).exp()
    weights = left * (C @ B.mT)[..., None] * dt[:, None]
    y = torch.einsum("cijh,cjhp->cihp", weights, x)
    kept = ((a[:, -1:] - a).exp() * dt)[..., None] * x
    states, whole, before = torch.einsum("cjhp,cjn->chpn", kept, B), a[:, -1].exp(), []
    for own, decay in zip(states, whole):
        before.append(h)
        h = decay[:, None, None] * h + own
    y = y + torch.einsum("cin,chpn->cihp", C, torch.stack(before)) * a.exp()[..., None]
    return y.flatten(0, 1)[:s], h


# %% right: with weights of its own, head by head
import torch

def chunked(x, dt, A, B, C, h, size):
    y, last = torch.empty_like(x), []
    for i in range(len(A)):
        state = h[i]
        for cut in torch.arange(len(x)).split(size):
            a = torch.cumsum(dt[cut, i] * A[i], 0)
            u = dt[cut, i, None] * x[cut, i]
            w = torch.tril((a[:, None] - a).clamp(max=0).exp() * (C[cut] @ B[cut].T))
            y[cut, i] = w @ u + a.exp()[:, None] * (C[cut] @ state.T)
            state = a[-1].exp() * state + ((a[-1] - a).exp()[:, None] * u).T @ B[cut]
        last.append(state)
    return y, torch.stack(last)


# %% right: the state as one more token before the chunk
import torch
from exercises.as_attention import as_attention

def chunked(x, dt, A, B, C, h, size):
    out = []
    for xs, dts, Bs, Cs in zip(*(t.split(size) for t in (x, dt, B, C))):
        since = torch.cumsum(dts * A, 0)
        from_state = torch.matmul(h, Cs.T).permute(2, 0, 1) * since.exp().unsqueeze(-1)
        out.append(torch.add(as_attention(xs, dts, A, Bs, Cs), from_state))
        to_end = (since[-1:] - since).exp() * dts
        h = h * since[-1].exp().view(-1, 1, 1) + torch.einsum("lh,lhp,ln->hpn", to_end, xs, Bs)
    return torch.cat(out, 0), h


# %% right: decays to the end by a sum from behind
import torch
from exercises.as_attention import as_attention

def chunked(x, dt, A, B, C, h, size):
    y = torch.zeros_like(x)
    for start in range(0, len(x), size):
        cut = slice(start, min(start + size, len(x)))
        g = dt[cut] * A
        after = g.flip(0).cumsum(0).flip(0) - g
        y[cut] = as_attention(x[cut], dt[cut], A, B[cut], C[cut])
        y[cut] += torch.exp(g.cumsum(0))[:, :, None] * (C[cut] @ h.flatten(0, 1).T).view(-1, *h.shape[:2])
        u = (torch.exp(after) * dt[cut])[:, :, None] * x[cut]
        h = torch.exp(g.sum(0))[:, None, None] * h + (u.flatten(1).T @ B[cut]).view_as(h)
    return y, h


# %% wrong: a state for each token
# told: twice the weights within all chunks
import torch

def chunked(x, dt, A, B, C, h, size):
    s, (heads, p, n) = len(x), h.shape
    wrote = (dt[..., None] * x)[..., None] * B[:, None, None]
    parts = []
    for start in range(0, s, size):
        a = (dt[start : start + size] * A).cumsum(0).T
        later = torch.ones(a.shape[1], a.shape[1]).triu(1).bool()
        left = (a[:, :, None] - a[:, None]).masked_fill(later, -torch.inf).exp()
        own = wrote[start : start + size].transpose(0, 1).flatten(2)
        states = (left @ own).view(heads, -1, p, n) + a.exp()[..., None, None] * h[:, None]
        parts.append(torch.einsum("hlpn,ln->lhp", states, C[start : start + size]))
        h = states[:, -1]
    return torch.cat(parts), h
