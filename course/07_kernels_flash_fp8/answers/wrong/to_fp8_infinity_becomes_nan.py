# told: infinite number is beyond | hidden
import torch


def to_fp8(x, mantissa, lowest, top):
    small = torch.minimum(x.abs(), torch.tensor(top)) / x.abs()
    x = torch.where(x == 0, x, x * small)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=lowest)
    step = torch.exp2((exponent - mantissa).float())
    return torch.round(x / step) * step
