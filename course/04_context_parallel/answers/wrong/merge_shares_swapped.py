# told: shares are exchanged
import torch


def merge(out, lse, more, more_lse):
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    return torch.exp(more_lse - finite)[..., None] * out + torch.exp(lse - finite)[..., None] * more, total
