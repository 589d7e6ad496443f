from labkit.answers import Edit

_CODE = "torch.ceil(torch.log2(amax / top)).clamp(min=-127) + 127"
WRONG = [
    Edit("amax / top", "top / amax", mistake="x is *divided* by X here: X grows with amax."),
    Edit("torch.ceil", "torch.round", mistake="Rounded to the nearest power, some tiles go beyond the top. Round up."),
    Edit("torch.ceil", "torch.floor", mistake="Rounded down, the largest number of the tile goes beyond the top. Round up."),
    Edit(".abs()", "", mistake="The largest *magnitude*: abs first."),
    Edit("torch.ceil(torch.log2(amax / top))", "(torch.floor(torch.log2(amax)) - 8)", mistake="That is the rule of the standard's example: what lies beyond 1.75 times a power of two is cut off."),
    Edit(".clamp(min=-127) + 127", ".clamp(min=-127)", told="expected"),
    Edit(".clamp(min=-127)", "", mistake="Below 2^-127 there is no X: the byte is 0 there."),
    Edit(".clamp(min=-127)", ".clamp(min=-126)", told="expected"),
    Edit("torch.stack(rows).double()", "torch.stack(rows)", mistake="In float32 the quotient or its log2 rounds: of a number just above the top times a power of two it comes out as this power."),
    Edit("amax / top", "amax / 448.0"),
    Edit(".abs().max() for", ".abs().mean() for"),
    Edit(".abs().max() for", ".norm() for"),
    Edit("tile[1], 1)", "tile[0], 1)"),
    Edit("torch.where(amax.isfinite(), code, 255.0)", "code.nan_to_num(255.0)", told="hidden"),
    Edit("torch.where(amax.isfinite(), code, 255.0)", "torch.where(amax.isnan(), 255.0, code)", told="hidden"),
    Edit(".to(torch.uint8)", "", told="float64"),
    Edit("torch.ceil(", "torch.ceil(1e-9 + ", told="hidden"),
    Edit("torch.ceil(", "torch.ceil(-1e-7 + ", told="hidden"),
    # a tile of zeros as 1
    Edit("    return torch.where", "    code = torch.where(amax == 0, 127.0, code)\n    return torch.where", told="expected"),
]

RIGHT = [
    Edit(_CODE, "torch.log2(amax / top).ceil().add(127).clamp(min=0)"),
]


# %% right: padded, then one amax over a view; frexp of both
import torch
import torch.nn.functional as F


def tile_scales(x, tile, top):
    m, n = tile
    p = F.pad(x.abs(), (0, -x.shape[1] % n, 0, -x.shape[0] % m))
    a = p.unflatten(1, (-1, n)).unflatten(0, (-1, m)).amax((1, 3))
    (fraction, exponent), (of_top, at) = torch.frexp(a), torch.frexp(torch.tensor(top))
    code = (exponent - at + (fraction > of_top) + 127).clamp(min=0)
    code = torch.where(a > 0, code, 0)
    return torch.where(a.isfinite(), code, 255).byte()


# %% right: tile by tile, in Python
import math
import torch


def tile_scales(x, tile, top):
    M, N = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
    out = torch.zeros(M, N, dtype=torch.uint8)
    for i in range(M):
        for j in range(N):
            a = x[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]].abs().max().item()
            if not math.isfinite(a):
                out[i, j] = 255
            elif a:
                out[i, j] = max(0, 127 + math.ceil(math.log2(a / top)))
    return out


# %% right: doubled until it fits
import torch


def tile_scales(x, tile, top):
    a = torch.stack([torch.stack([p.abs().amax() for p in r.split(tile[1], 1)]) for r in x.split(tile[0])]).double()
    code = torch.zeros_like(a)
    bad = ~a.isfinite()
    a[bad] = 0
    while (over := a > top * 2.0 ** (code - 127)).any():
        code = torch.where(over, code + 1, code)
    code[bad] = 255
    return code.to(torch.uint8)


# %% right: NumPy, reduceat and frexp
import numpy as np
import torch


def tile_scales(x, tile, top):
    a = np.abs(x.numpy().astype(np.float64))
    a = np.maximum.reduceat(a, np.arange(0, a.shape[0], tile[0]), axis=0)
    a = np.maximum.reduceat(a, np.arange(0, a.shape[1], tile[1]), axis=1)
    fraction, exponent = np.frexp(np.where(np.isfinite(a), a, 1.0) / top)
    code = np.clip(np.where(fraction == 0.5, exponent - 1, exponent) + 127, 0, 254)
    return torch.from_numpy(np.where(np.isfinite(a), np.where(a > 0, code, 0), 255).astype(np.uint8))


# %% wrong: the scale itself
# told: uint8 | dtype | float32
import torch
import torch.nn.functional as F
def tile_scales(x, tile, top):
    a, b = tile
    m, n = x.shape
    y = F.pad(x, (0, -n % b, 0, -m % a))
    amax = y.view(y.shape[0] // a, a, y.shape[1] // b, b).abs().amax((1, 3)).double()
    return (2 ** torch.ceil(torch.log2(amax / top))).float()


# %% wrong: mean of magnitudes
# told: The largest magnitude of a tile decides alone
import torch
import torch.nn.functional as F
def tile_scales(x, tile, top):
    a, b = tile
    m, n = x.shape
    y = F.pad(x, (0, -n % b, 0, -m % a))
    amax = y.view(y.shape[0] // a, a, y.shape[1] // b, b).abs().mean((1, 3)).double()
    code = torch.ceil(torch.log2(amax / top)).clamp(min=-127) + 127
    return torch.where(amax.isfinite(), code, 255.0).to(torch.uint8)


# %% wrong: rows and columns changed
import torch


def tile_scales(x, tile, top):
    n, m = tile
    amax = torch.stack([torch.stack([p.abs().max() for p in r.split(n, 1)]) for r in x.split(m)]).double()
    code = torch.ceil(torch.log2(amax / top)).clamp(min=-127) + 127
    return torch.where(amax.isfinite(), code, 255.0).to(torch.uint8)
