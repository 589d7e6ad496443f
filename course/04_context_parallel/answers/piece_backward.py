from labkit.answers import Edit

WRONG = [
    Edit(" - (dout * out).sum(-1, keepdim=True)", "", mistake="Softmax's gradient is P (dP - D), D = rowsum(dout*out)."),
    Edit("keepdim=True)) * sigma", "keepdim=True))", mistake="The scores were divided by sqrt(d); so are dS."),
    Edit(
        "scores - lse[..., None]",
        "scores - scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)",
        mistake="P = exp(S - lse) with the *final* lse, of all keys. The sum over this piece alone is too small.",
    ),
    # dq and dk swapped
    Edit(
        "return ds @ k, ds.mT @ q, p.mT @ dout", "return ds.mT @ q, ds @ k, p.mT @ dout", mistake="dQ and dK are exchanged: dV is right, and so is dS. The order is dq, dk, dv."
    ),
    # dv of the unnormalised
    Edit("return ds @ k, ds.mT @ q, p.mT @ dout", "return ds @ k, ds.mT @ q, torch.exp(scores).mT @ dout"),
    # hides its own place
    Edit("k_at > q_at", "k_at >= q_at", mistake="A query also sees the key at its own place: P is 0 only where k_at > q_at."),
    # mask by index
    Edit(
        "k_at > q_at[:, None]",
        "torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)",
        mistake="The mask compares the places q_at and k_at, not the numbers of rows and columns.",
    ),
    # no mask
    Edit(
        "scores = (q @ k.mT * sigma).masked_fill(k_at > q_at[:, None], -torch.inf)",
        "scores = (q @ k.mT * sigma)",
        mistake="A key that a query does not see takes no part: P is 0 where k_at > q_at.",
    ),
    # out of this piece
    Edit("dout * out", "dout * (p @ v)"),
    # scaled twice
    Edit("return ds @ k, ds.mT @ q, p.mT @ dout", "return ds @ k, ds.mT @ q * sigma, p.mT @ dout"),
    # softmax of these keys
    Edit("p = torch.exp(scores - lse[..., None])", "p = scores.softmax(-1).nan_to_num(0.0)"),
    # sum over this piece
    Edit("dout * out", "p * (dout @ v.mT)"),
]

RIGHT = [
    Edit(
        "ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma",
        "ds = p * ((dout @ v.mT) - (dout.double() * out.double()).sum(-1, keepdim=True).float())",
        ("return ds @ k, ds.mT @ q,", "return sigma * (ds @ k), sigma * (ds.mT @ q),"),
    ),
]


# %% right: the gradient of exp(S - lse) V by autograd, with D put in by hand
import torch
import torch.distributed as dist
import torch.nn.functional as F
def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        p = torch.exp(q @ k.mT / q.shape[-1] ** 0.5 - lse[..., None]) * (q_at[:, None] >= k_at)
        p = p.where(q_at[:, None] >= k_at, torch.zeros(()))
        y = (p @ v * dout).sum() - (p * (dout * out).sum(-1, keepdim=True)).sum()
    return torch.autograd.grad(y, (q, k, v))


# %% right: einsum throughout
import torch
import torch.distributed as dist
import torch.nn.functional as F
def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    d = q.shape[-1] ** 0.5
    s = torch.einsum('aid,ajd->aij', q, k) / d
    p = (s - lse.unsqueeze(2)).exp().masked_fill(q_at.unsqueeze(1) < k_at, 0)
    dp = torch.einsum('aid,ajd->aij', dout, v)
    ds = p * (dp - torch.einsum('aid,aid->ai', dout, out).unsqueeze(2)) / d
    return torch.einsum('aij,ajd->aid', ds, k), torch.einsum('aij,aid->ajd', ds, q), torch.einsum('aij,aid->ajd', p, dout)


# %% right: einsum, head by head, in float64, a list
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    found = []
    for a in range(q.shape[0]):
        do, qa, ka, va, oa, la = (t[a].double() for t in (dout, q, k, v, out, lse))
        see = q_at.view(-1, 1) >= k_at.view(1, -1)
        p = torch.where(see, torch.exp(torch.einsum("nd,md->nm", qa, ka) / q.shape[-1] ** 0.5 - la[:, None]), 0.0)
        ds = p * (torch.einsum("nd,md->nm", do, va) - torch.einsum("nd,nd->n", do, oa)[:, None]) / q.shape[-1] ** 0.5
        found.append((torch.einsum("nm,md->nd", ds, ka), torch.einsum("nm,nd->md", ds, qa), p.T @ do))
    return [torch.stack(parts).to(q.dtype) for parts in zip(*found)]


# %% right: autograd of a sum whose gradient it is
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    with torch.enable_grad():
        qq, kk, vv = (t.detach().clone().requires_grad_() for t in (q, k, v))
        s = (qq @ kk.mT / q.shape[-1] ** 0.5).masked_fill(k_at > q_at[:, None], -torch.inf)
        p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        # sum p (dout . v) - D sum p
        total = (p * (dout @ vv.mT)).sum() - ((dout * out).sum(-1) * p.sum(-1)).sum()
        return torch.autograd.grad(total, (qq, kk, vv))


# %% wrong: dk and dv exchanged
# mistake: dK and dV are exchanged: the order is dq, dk, dv.
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    sigma = q.shape[-1] ** -0.5
    p = torch.exp((q @ k.mT * sigma).masked_fill(k_at > q_at[:, None], -torch.inf) - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma
    return ds @ k, p.mT @ dout, ds.mT @ q


# %% wrong: dv first
# mistake: These are dV, dQ, dK. The order is dq, dk, dv.
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    c = q.shape[-1] ** -0.5
    p = torch.where(q_at[:, None] >= k_at, (q @ k.mT * c - lse[..., None]).exp(), 0)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * c
    return p.mT @ dout, ds @ k, ds.mT @ q


# %% wrong: exponential of lse
# mistake: exp of a score of 120 overflows, and so does exp(lse). Subtract first: exp(S - lse).
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    c = q.shape[-1] ** -0.5
    s = (q @ k.mT * c).masked_fill(q_at[:, None] < k_at, -torch.inf)
    p = s.exp() / lse.exp()[..., None]
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * c
    return ds @ k, ds.mT @ q, p.mT @ dout


# %% wrong: scale in dq alone
# mistake: dQ and dV are right, dK is not: dK = dS^T Q.
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    sigma = q.shape[-1] ** -0.5
    p = torch.exp((q @ k.mT * sigma).masked_fill(k_at > q_at[:, None], -torch.inf) - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return sigma * (ds @ k), ds.mT @ q, p.mT @ dout


# %% wrong: scores not scaled
# mistake: P is wrong: its scores are divided by sqrt(d), as in the forward pass.
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    c = q.shape[-1] ** -0.5
    p = torch.where(q_at[:, None] >= k_at, (q @ k.mT - lse[..., None]).exp(), 0)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * c
    return ds @ k, ds.mT @ q, p.mT @ dout
# %% wrong: changes q
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    sigma = q.shape[-1] ** -0.5
    q *= sigma
    scores = (q @ k.mT).masked_fill(k_at > q_at[:, None], -torch.inf)
    p = torch.exp(scores - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma
    return ds @ k, ds.mT @ q / sigma, p.mT @ dout


