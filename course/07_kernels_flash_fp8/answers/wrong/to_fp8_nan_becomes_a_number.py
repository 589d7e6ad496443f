# told: NaN stays NaN
# the grid, and its nearest number
import torch


def to_fp8(x, mantissa, lowest, top):
    grid = [m * 2.0 ** (lowest - mantissa) for m in range(2**mantissa)]
    e = lowest
    while 2.0**e <= top:
        grid += [(1 + m / 2**mantissa) * 2.0**e for m in range(2**mantissa)]
        e += 1
    grid = torch.tensor([g for g in grid if g <= top], dtype=torch.float64)
    gap = (x.double().abs().clamp(max=top)[..., None] - grid).abs()
    tied = gap == gap.amin(-1, keepdim=True)
    even = torch.arange(len(grid)) % 2 == 0
    i = (tied.int() * 2 + (tied & even).int()).argmax(-1)
    return torch.copysign(grid[i].float(), x)
