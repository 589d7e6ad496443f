# a magic number that pushes the last mantissa out
import torch
import torch.distributed as dist
def to_fp8(x, mantissa, lowest, top):
    y = x.double().clamp(-top, top)
    e = torch.floor(torch.log2(y.abs())).clamp(min=lowest)
    magic = 1.5 * 2.0 ** (52 + e - mantissa)
    return ((y + magic) - magic).float()
