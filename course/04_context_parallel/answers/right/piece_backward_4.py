import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    with torch.enable_grad():
        qq, kk, vv = (t.detach().clone().requires_grad_() for t in (q, k, v))
        s = (qq @ kk.mT / q.shape[-1] ** 0.5).masked_fill(k_at > q_at[:, None], -torch.inf)
        p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        # sum p (dout . v) - D sum p
        total = (p * (dout @ vv.mT)).sum() - ((dout * out).sum(-1) * p.sum(-1)).sum()
        return torch.autograd.grad(total, (qq, kk, vv))
