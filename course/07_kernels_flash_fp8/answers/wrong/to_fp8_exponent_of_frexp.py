# told: one higher
import torch
def to_fp8(x, mantissa, lowest, top):
    y = x.clamp(-top, top)
    m, e = torch.frexp(y)
    e = e.clamp(min=lowest)
    return torch.ldexp(torch.round(torch.ldexp(y, mantissa - e)), e - mantissa)
