# integers: round the bits of a float32
import torch
import torch.distributed as dist
def to_fp8(x, mantissa, lowest, top):
    a = x.float().abs().clamp(max=top)
    u = a.view(torch.int32)
    cut = 23 - mantissa
    u = u + (1 << (cut - 1)) - 1 + (u >> cut & 1)
    normal = (u >> cut << cut).view(torch.float32)
    small = torch.round(a * 2.0 ** (mantissa - lowest)) * 2.0 ** (lowest - mantissa)
    return torch.copysign(torch.where(a < 2.0 ** lowest, small, normal), x)
