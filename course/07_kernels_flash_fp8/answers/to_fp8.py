from labkit.answers import Edit, Same

WRONG = [
    Edit(".clamp(-top, top)", "", mistake="Beyond ±top the answer is ±top."),
    Edit("torch.round(x / step)", "torch.trunc(x / step)", mistake="This cuts bits off. Round to the nearest."),
    Edit("torch.round(x / step)", "torch.floor(x / step)"),
    Edit("torch.round(x / step)", "torch.floor(x / step + 0.5)", mistake="Half-way goes to the number whose last bit is *even* (0), not up."),
    Edit(".clamp(min=lowest)", "", mistake="Below 2**lowest the steps get no finer: they stay as they are."),
    Edit(
        "return torch.round(x / step) * step",
        "return torch.where(x.abs() < 2.0**lowest, 0.0, torch.round(x / step) * step)",
        mistake="Below 2**lowest there are still numbers: multiples of 2**(lowest - mantissa).",
    ),
    Edit("x.float().clamp(-top, top)", "x.clamp_(-top, top)", told="changes its input"),
    Edit("x = x.float().clamp(-top, top)", "x = torch.where(x.abs() > top, torch.nan, x.float())", told="got"),
    Edit("torch.round(x / step)", "torch.ceil(x / step)"),
    # stochastic
    Edit("torch.round(x / step)", "torch.floor(x / step + torch.rand_like(x))", told="got"),
    # twice: to 4 mantissa bits first
    Edit("torch.round(x / step) * step", "torch.round(torch.round(2 * x / step) / 2) * step", told="hidden"),
    Edit("torch.round(x / step)", "torch.ceil(x / step - 0.5)", told="hidden"),
    Edit(
        "(torch.frexp(x).exponent - 1)",
        "torch.frexp(x).exponent",
        ("return torch.round(x / step) * step", "return (torch.round(x / step) * step).clamp(-top, top)"),
        mistake="Here the steps are twice too large: torch.frexp gives a fraction between 0.5 and 1, and so an exponent that is one higher.",
    ),
    Edit(
        "torch.round(x / step)",
        "(x.sign() * torch.floor(x.abs() / step + 0.5))",
        mistake="Half-way goes to the number whose last bit is *even* (0), not away from 0.",
    ),
    Edit("clamp(min=lowest)", "clamp(min=lowest - 1)"),
    Edit("clamp(min=lowest)", "clamp(min=-6)"),
    Edit("exponent - mantissa", "exponent - 3"),
    Edit(".clamp(-top, top)", ".clamp(-448.0, 448.0)"),
    Edit("return torch.round(x / step) * step", "return (torch.round(x / step) * step).abs()"),
    Edit("return torch.round(x / step) * step", "return (torch.round(x / step) * step).nan_to_num(0.0)"),
    Edit("return torch.round(x / step) * step", "return (torch.round(x / step) * step).double()", told="float64"),
    # by way of bf16
    Edit("x = x.float()", "x = x.bfloat16().float()"),
    # infinity becomes nan
    Edit(
        "x = x.float().clamp(-top, top)",
        """small = torch.minimum(x.abs(), torch.tensor(top)) / x.abs()
    x = torch.where(x == 0, x, x * small)"""),
]

EQUIVALENT = [
    Same("line 6: `.float()` dropped", "the tensors of this exercise are float32"),
    Same("line 8: `.float()` dropped", "exp2 of whole numbers is float32, too"),
]


# %% right: integers: round the bits of a float32
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


# %% right: a magic number that pushes the last mantissa out
import torch
import torch.distributed as dist
def to_fp8(x, mantissa, lowest, top):
    y = x.double().clamp(-top, top)
    e = torch.floor(torch.log2(y.abs())).clamp(min=lowest)
    magic = 1.5 * 2.0 ** (52 + e - mantissa)
    return ((y + magic) - magic).float()


# %% right: the grid, and its nearest number
import torch
import torch.distributed as dist
def to_fp8(x, mantissa, lowest, top):
    grid = [m * 2.0 ** (lowest - mantissa) for m in range(2 ** mantissa)]
    e = lowest
    while 2.0 ** e <= top:
        grid += [(1 + m / 2 ** mantissa) * 2.0 ** e for m in range(2 ** mantissa)]
        e += 1
    grid = torch.tensor([g for g in grid if g <= top], dtype=torch.float64)
    gap = (x.double().abs().clamp(max=top)[..., None] - grid).abs()
    tied = gap == gap.amin(-1, keepdim=True)
    even = torch.arange(len(grid)) % 2 == 0
    i = (tied.int() * 2 + (tied & even).int()).argmax(-1)
    return torch.where(x.isnan(), x, torch.copysign(grid[i].float(), x))


# %% right: NumPy: scaled to whole numbers by ldexp, rint
import numpy as np
import torch


def to_fp8(x, mantissa, lowest, top):
    a = np.clip(x.numpy().astype(np.float64), -top, top)
    exponent = np.maximum(np.frexp(a)[1] - 1, lowest)
    return torch.from_numpy(np.ldexp(np.rint(np.ldexp(a, mantissa - exponent)), exponent - mantissa)).float()


# %% wrong: casts of torch
# mistake: torch's float8 has these two formats only; others are asked, too.
import torch
def to_fp8(x, mantissa, lowest, top):
    return x.clamp(-top, top).to(torch.float8_e4m3fn if mantissa == 3 else torch.float8_e5m2).float()


# %% wrong: decimal places
import torch
def to_fp8(x, mantissa, lowest, top):
    return torch.round(x.clamp(-top, top), decimals=mantissa)


# %% wrong: equal steps
import torch
def to_fp8(x, mantissa, lowest, top):
    y = x.clamp(-top, top)
    e = torch.zeros_like(y)
    step = 2.0 ** (e - mantissa)
    return torch.round(y / step) * step


# %% wrong: exponent of frexp
# mistake: Here the steps are twice too large: torch.frexp gives a fraction between 0.5 and 1, and so an exponent that is one higher.
import torch
def to_fp8(x, mantissa, lowest, top):
    y = x.clamp(-top, top)
    m, e = torch.frexp(y)
    e = e.clamp(min=lowest)
    return torch.ldexp(torch.round(torch.ldexp(y, mantissa - e)), e - mantissa)


# %% wrong: exponent to the nearest
import torch
def to_fp8(x, mantissa, lowest, top):
    y = x.clamp(-top, top)
    e = torch.round(torch.log2(y.abs())).clamp(min=lowest)
    step = 2.0 ** (e - mantissa)
    return torch.round(y / step) * step


# %% wrong: infinity stays
# mistake: Infinity is beyond ±top, too: the answer is ±top.
import torch
def to_fp8(x, mantissa, lowest, top):
    e = torch.floor(torch.log2(x.abs())).clamp(min=lowest)
    step = 2.0 ** (e - mantissa)
    y = torch.round(x / step) * step
    return torch.where(x.isinf(), x, y.clamp(-top, top))


# %% wrong: nan becomes a number
# mistake: NaN stays NaN: as a number it would hide that a step went wrong.
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


# %% wrong: of the package
# told: `minimegatron.kernels` is closed in this exercise
from minimegatron.kernels import reference


def to_fp8(x):
    return reference.fp8_cast(x)


# %% wrong: torch cast
# told: hidden
import torch
def to_fp8(x, mantissa, lowest, top):
    d = torch.float8_e4m3fn if mantissa == 3 else torch.float8_e5m2
    return x.clamp(-top, top).to(d).float()
