# told: too, and becomes ±top.
import torch
def to_fp8(x, mantissa, lowest, top):
    e = torch.floor(torch.log2(x.abs())).clamp(min=lowest)
    step = 2.0 ** (e - mantissa)
    y = torch.round(x / step) * step
    return torch.where(x.isinf(), x, y.clamp(-top, top))
