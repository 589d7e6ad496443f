import torch
def to_fp8(x, mantissa, lowest, top):
    y = x.to(torch.float64).clamp(-top, top)
    e = torch.floor(torch.log2(y.abs())).clamp(min=lowest)
    magic = 1.5 * torch.exp2(e - mantissa + 52)
    return ((y + magic) - magic).float()
