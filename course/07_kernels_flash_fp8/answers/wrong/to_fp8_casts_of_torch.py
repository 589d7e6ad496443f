# told: Other formats than E4M3 and E5M2
import torch
def to_fp8(x, mantissa, lowest, top):
    return x.clamp(-top, top).to(torch.float8_e4m3fn if mantissa == 3 else torch.float8_e5m2).float()
