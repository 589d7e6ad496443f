# told: row by row
import torch


def merge(out, lse, more, more_lse):
    if torch.isinf(lse).any():
        return more, more_lse
    if torch.isinf(more_lse).any():
        return out, lse
    t = torch.logaddexp(lse, more_lse)
    return (lse - t).exp()[..., None] * out + (more_lse - t).exp()[..., None] * more, t
