# told: decimal places
import torch
def to_fp8(x, mantissa, lowest, top):
    return torch.round(x.clamp(-top, top), decimals=mantissa)
