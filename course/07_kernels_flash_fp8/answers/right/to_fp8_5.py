import torch
def to_fp8(x, mantissa, lowest, top):
    values, e = [k * 2.0 ** (lowest - mantissa) for k in range(2**mantissa)], lowest
    while 2.0**e <= top:
        values += [(2**mantissa + k) * 2.0 ** (e - mantissa) for k in range(2**mantissa)]
        e += 1
    t = torch.tensor([v for v in values if v <= top], dtype=torch.float64)
    y = x.double().abs().clamp(max=top)
    i = torch.searchsorted(t, y.nan_to_num(0.0)).clamp(max=len(t) - 1)
    lo = (i - 1).clamp(min=0)
    up, down = t[i] - y, y - t[lo]
    take = torch.where((up < down) | ((up == down) & (i % 2 == 0)), t[i], t[lo])
    out = torch.copysign(take, x.double())
    return torch.where(x.isnan(), torch.nan, out).float()
