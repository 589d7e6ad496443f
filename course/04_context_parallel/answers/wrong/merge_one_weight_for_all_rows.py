# told: 
import torch


def merge(out, lse, more, more_lse):
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    return torch.exp(lse - finite).mean() * out + torch.exp(more_lse - finite)[..., None] * more, total
