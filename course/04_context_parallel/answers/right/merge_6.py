import torch


def merge(out, lse, more, more_lse):
    share = torch.nan_to_num(torch.sigmoid(more_lse - lse), nan=0.0).unsqueeze(-1)
    return out + share * (more - out), torch.logaddexp(lse, more_lse)
