from labkit.answers import Edit

WRONG = [
    Edit("top / amax.double()", "amax.double() / top", ("torch.floor", "torch.ceil"), told="This is the inverse"),
    Edit(
        "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
        "top / amax.double()",
        told="power of two",
    ),
    Edit("torch.floor", "torch.round", told="to the nearest power"),
    Edit("torch.floor", "torch.ceil", told="Rounded up"),
    Edit(".abs()", "", told="abs first"),
    Edit(
        "torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127)), 1.0)",
        "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
        told="1 where amax is 0",
    ),
    Edit(".clamp(max=127)", "", told="at most 2**127"),
    Edit("amax.double()", "amax", told="In float32 log2 rounds | hidden"),
    Edit("torch.floor(", "torch.floor(-1e-9 + ", told="hidden"),
    Edit("torch.floor(", "torch.floor(1e-7 + ", told="hidden"),
    Edit("top / amax", "448.0 / amax"),
    Edit(".abs().max() for", ".abs().mean() for"),
    Edit(".abs().max() for", ".norm() for"),
    Edit("tile[1], 1)", "tile[0], 1)"),
    Edit("amax > 0", "amax > 1e-12"),
    Edit("1.0).float()", "0.0).float()", told="nothing to scale"),
    Edit("1.0).float()", "5.0).float()", told="expected tensor([[1.0"),
    Edit("1.0).float()", "1.0)", told="float64"),
    Edit(".abs().max()", ".abs().sum()"),
    Edit(
        "where(amax > 0, torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127)), 1.0).float()",
        "where(amax > 0, 2.0 ** torch.floor(torch.log2(top / amax)), 1.0)",
        told="In float32 log2 rounds | hidden",
    ),
]


# %% right: padded, then one amax over a view
import torch
import torch.nn.functional as F


def tile_scales(x, tile, top):
    m, n = tile
    p = F.pad(x.abs(), (0, -x.shape[1] % n, 0, -x.shape[0] % m))
    a = p.unflatten(1, (-1, n)).unflatten(0, (-1, m)).amax((1, 3))
    return torch.where(a > 0, torch.exp2((top / a.double()).log2().floor().clamp(max=127)).float(), 1.0)


# %% right: tile by tile, in Python
import math
import torch


def tile_scales(x, tile, top):
    M, N = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
    out = torch.ones(M, N)
    for i in range(M):
        for j in range(N):
            a = x[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]].abs().max().item()
            if a:
                out[i, j] = 2.0 ** min(math.floor(math.log2(top / a)), 127)
    return out


# %% right: max pooling; halved until it fits
import torch
import torch.nn.functional as F


def tile_scales(x, tile, top):
    a = F.max_pool2d(x.abs()[None].double(), tuple(tile), tuple(tile), ceil_mode=True)[0]
    scale = torch.full_like(a, 2.0**127)
    while (over := a * scale > top).any():
        scale = torch.where(over, scale / 2, scale)
    return torch.where(a > 0, scale, 1.0).float()


# %% right: NumPy, reduceat and frexp
import numpy as np
import torch


def tile_scales(x, tile, top):
    a = np.abs(x.numpy().astype(np.float64))
    a = np.maximum.reduceat(a, np.arange(0, a.shape[0], tile[0]), axis=0)
    a = np.maximum.reduceat(a, np.arange(0, a.shape[1], tile[1]), axis=1)
    with np.errstate(divide="ignore"):
        exponent = np.frexp(top / a)[1] - 1
    return torch.from_numpy(np.where(a > 0, np.ldexp(1.0, np.minimum(exponent, 127)), 1.0)).float()


# %% right: as the hint says, tile by tile
import math

import torch


def tile_scales(x, tile, top):
    scales = []
    for row in x.split(tile[0]):
        amaxes = [piece.abs().max().double() for piece in row.split(tile[1], dim=1)]
        scales.append([2 ** min(127, math.floor(math.log2(top / amax))) if amax else 1 for amax in amaxes])
    return torch.tensor(scales, dtype=torch.float32)


# %% right: max_pool2d
import torch
import torch.nn.functional as F
def tile_scales(x, tile, top):
    amax = F.max_pool2d(x.abs()[None, None], tile, tile, ceil_mode=True)[0, 0].double()
    e = torch.floor(torch.log2(top / amax)).clamp(max=127)
    return torch.where(amax == 0, 1.0, torch.exp2(e)).float()


# %% wrong: exponents
# told: This is an exponent
import torch
import torch.nn.functional as F
def tile_scales(x, tile, top):
    a, b = tile
    m, n = x.shape
    y = F.pad(x, (0, -n % b, 0, -m % a))
    amax = y.view(y.shape[0] // a, a, y.shape[1] // b, b).abs().amax((1, 3)).double()
    scale = torch.floor(torch.log2(top / amax))
    return torch.where(amax == 0, 1.0, scale.clamp(max=2.0**127)).float()


# %% wrong: infinite
# told: at most 2**127
import torch


def tile_scales(x, tile, top):
    rows = [torch.stack([piece.abs().max() for piece in row.split(tile[1], 1)]) for row in x.split(tile[0])]
    amax = torch.stack(rows).double()
    return torch.where(amax > 0, 2.0 ** torch.floor(torch.log2(top / amax)), 1.0).float()


# %% wrong: mean of magnitudes
# told: The largest magnitude of a tile decides alone
import torch
import torch.nn.functional as F
def tile_scales(x, tile, top):
    a, b = tile
    m, n = x.shape
    y = F.pad(x, (0, -n % b, 0, -m % a))
    amax = y.view(y.shape[0] // a, a, y.shape[1] // b, b).abs().mean((1, 3)).double()
    scale = 2 ** torch.floor(torch.log2(top / amax))
    return torch.where(amax == 0, 1.0, scale.clamp(max=2.0**127)).float()


# %% wrong: rows and columns changed
import torch


def tile_scales(x, tile, top):
    n, m = tile
    amax = torch.stack([torch.stack([p.abs().max() for p in r.split(n, 1)]) for r in x.split(m)]).double()
    return torch.where(amax > 0, 2.0 ** torch.floor(torch.log2(top / amax)).clamp(max=127), 1.0).float()


# %% wrong: whole rows only
# the last rows, where they do not fill a tile, are left out
import torch


def tile_scales(x, tile, top):
    m, n = tile
    x = x[: len(x) // m * m] if len(x) >= m else x
    amax = torch.stack([torch.stack([p.abs().max() for p in r.split(n, 1)]) for r in x.split(m)]).double()
    return torch.where(amax > 0, 2.0 ** torch.floor(torch.log2(top / amax)).clamp(max=127), 1.0).float()
