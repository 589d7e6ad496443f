# told: 
import torch


def merge(out, lse, more, more_lse):
    larger = (more_lse > lse)[..., None]
    return torch.where(larger, more, out), torch.logaddexp(lse, more_lse)
