# told: the exponent is rounded to the nearest
import torch
def to_fp8(x, mantissa, lowest, top):
    y = x.clamp(-top, top)
    e = torch.round(torch.log2(y.abs())).clamp(min=lowest)
    step = 2.0 ** (e - mantissa)
    return torch.round(y / step) * step
