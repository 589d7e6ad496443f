from labkit.answers import Edit

_ORDER = "The gradients are right, and stand in another order: it is dq, dk, dv."
_THREE = "return ds @ k, ds.mT @ q, p.mT @ dout"
_MASK = (
    "exp of a hidden score far above lse is inf, and inf times 0 is NaN: hide the score before exp, or set P to 0 "
    "rather than multiply it by the mask."
)
_SCORES = "    scores = (q @ k.mT * sigma)"

WRONG = [
    Edit(_SCORES, f"    dout, q, k, v, out, lse = (t.float() for t in (dout, q, k, v, out, lse))\n{_SCORES}",
         told="float32, not float64"),
    Edit("q @ k.mT * sigma", "q @ k.mT",
         mistake="P is wrong: its scores are divided by sqrt(d), as in the forward pass."),
    Edit(".masked_fill(k_at > q_at[:, None], -torch.inf)", "",
         mistake="A key that a query does not see takes no part: P is 0 where k_at > q_at."),
    Edit(_SCORES, f"    q_at, k_at = torch.arange(q.shape[1]), torch.arange(k.shape[1])\n{_SCORES}",
         mistake="The mask compares the places q_at and k_at, not the numbers of rows and columns."),
    Edit("k_at > q_at", "k_at >= q_at",
         mistake="A query also sees the key at its own place: P is 0 only where k_at > q_at."),
    Edit("scores - lse[..., None]", "scores - scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)",
         mistake="P = exp(S - lse) with the *final* lse, of all keys. The sum over this piece alone is too small."),
    Edit(_THREE, "return ds.mT @ q, ds @ k, p.mT @ dout", mistake=_ORDER),
    Edit(_THREE, "return ds @ k, p.mT @ dout, ds.mT @ q", mistake=_ORDER),
    Edit(_THREE, "return p.mT @ dout, ds @ k, ds.mT @ q", mistake=_ORDER),
    Edit(" - (dout * out).sum(-1, keepdim=True)", "",
         mistake="dS is P·dP here: the row's mean of dP is not subtracted."),
    Edit("keepdim=True)) * sigma", "keepdim=True))", mistake="The scores were divided by sqrt(d); so are dS."),
    Edit(_THREE, "return ds @ k * sigma, ds.mT @ q * sigma, p.mT @ dout",
         mistake="dS holds the sqrt(d) already: dQ and dK are not divided by it again."),
    Edit("torch.exp(scores - lse[..., None])", "scores.exp() / lse.exp()[..., None]",
         mistake="exp of a score of 120 overflows, and so does exp(lse). Subtract before you take exp."),
    Edit("keepdim=True)) * sigma", "keepdim=True))", ("ds @ k,", "sigma * (ds @ k),"),
         mistake="dQ is right. The scores were divided by sqrt(d), so dK must be, too."),
    Edit("keepdim=True)) * sigma", "keepdim=True))", ("ds.mT @ q,", "sigma * (ds.mT @ q),"),
         mistake="dK is right. The scores were divided by sqrt(d), so dQ must be, too."),
    Edit("(dout * out).sum(-1, keepdim=True)", "(dout * out).mean(-1, keepdim=True)",
         mistake="D is the sum of dout·out over the d numbers of a token, not their mean."),
    Edit(".masked_fill(k_at > q_at[:, None], -torch.inf)", "",
         ("torch.exp(scores - lse[..., None])", "torch.exp(scores - lse[..., None]) * (k_at <= q_at[:, None])"),
         mistake=_MASK),
    Edit("p.mT @ dout", "torch.exp(scores).mT @ dout"),
    Edit("dout * out", "dout * (p @ v)",
         mistake="You take the mean of dP over the keys of this piece. Asked is that over all keys of the row."),
    Edit("p = torch.exp(scores - lse[..., None])", "p = scores.softmax(-1).nan_to_num(0.0)"),
    Edit(_SCORES, f"    q *= sigma\n{_SCORES}", (" * sigma).", ")."), ("ds.mT @ q", "ds.mT @ q / sigma"),
         told="changes its input `q`"),
]

RIGHT = [
    Edit("(dout * out).sum(-1, keepdim=True)) * sigma", "(dout.double() * out.double()).sum(-1, keepdim=True).to(q))",
         ("return ds @ k, ds.mT @ q,", "return sigma * (ds @ k), sigma * (ds.mT @ q),")),
]


# %% right: the gradient of exp(S - lse) V by autograd, with D put in by hand
import torch

def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        s = (q @ k.mT / q.shape[-1] ** 0.5).where(q_at[:, None] >= k_at, torch.tensor(-torch.inf).to(q))
        p = torch.exp(s - lse[..., None])
        y = (p @ v * dout).sum() - (p * (dout * out).sum(-1, keepdim=True)).sum()
    return torch.autograd.grad(y, (q, k, v))


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
