# told: larger piece counts whole
import torch


def merge(out, lse, more, more_lse):
    m = torch.maximum(lse, more_lse)
    ref = m.masked_fill(m == -torch.inf, 0)
    a, b = (lse - ref).exp(), (more_lse - ref).exp()
    return a[..., None] * out + b[..., None] * more, torch.logaddexp(lse, more_lse)
