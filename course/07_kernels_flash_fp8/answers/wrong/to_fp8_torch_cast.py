# told: hidden
import torch
def to_fp8(x, digits, lowest, top):
    d = torch.float8_e4m3fn if digits == 3 else torch.float8_e5m2
    return x.clamp(-top, top).to(d).float()
