# told: hidden
import torch
def to_fp8(x, mantissa, lowest, top):
    d = torch.float8_e4m3fn if mantissa == 3 else torch.float8_e5m2
    return x.clamp(-top, top).to(d).float()
