from labkit.answers import Edit

WRONG = [
    Edit("top / amax.double()", "amax.double() / top", ("torch.floor", "torch.ceil"), mistake="This is the inverse. x is *multiplied* by the scale."),
    Edit(
        "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
        "top / amax.double()",
        mistake="Round it down to a power of two.",
    ),
    Edit("torch.floor", "torch.round", mistake="Rounded to the nearest power, some tiles go beyond the top. Round down."),
    Edit("torch.floor", "torch.ceil", mistake="Rounded up, the largest number of the tile goes beyond the top. Round down."),
    Edit(".abs()", "", mistake="The largest *magnitude*: abs first."),
    Edit(
        "torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127)), 1.0)",
        "torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127))",
        told="expected tensor([[1.0, 64.0]])",
    ),
    Edit(".clamp(max=127)", "", mistake="Of next to nothing the scale would be infinite. It is a float32, too: at most 2**127."),
    Edit("amax.double()", "amax", mistake="In float32 log2 rounds: top / amax = 0.99999994 comes out as 2**0, and amax times the scale lies" " beyond the top."),
    Edit("torch.floor(", "torch.floor(-1e-9 + ", told="hidden"),
    Edit("torch.floor(", "torch.floor(1e-7 + ", told="hidden"),
    Edit("top / amax", "448.0 / amax"),
    Edit(".abs().max() for", ".abs().mean() for"),
    Edit(".abs().max() for", ".norm() for"),
    Edit("tile[1], 1)", "tile[0], 1)"),
    Edit("amax > 0", "amax > 1e-12"),
    Edit("1.0).float()", "0.0).float()", mistake="A tile of zeros has nothing to scale: its scale is 1, and here it is not."),
    Edit("1.0).float()", "5.0).float()", told="expected tensor([[1.0"),
    Edit("1.0).float()", "1.0)", told="float64"),
    Edit(".abs().max()", ".abs().sum()"),
    Edit(
        "where(amax > 0, torch.exp2(torch.floor(torch.log2(top / amax.double())).clamp(max=127)), 1.0).float()",
        "where(amax > 0, 2.0 ** torch.floor(torch.log2(top / amax)), 1.0)",
        mistake="In float32 log2 rounds: top / amax = 0.99999994 comes out as 2**0, and amax times the scale lies" " beyond the top.",
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


# %% wrong: exponents
# mistake: This is an exponent: the scale is 2 to this power.
import torch
import torch.nn.functional as F
def tile_scales(x, tile, top):
    a, b = tile
    m, n = x.shape
    y = F.pad(x, (0, -n % b, 0, -m % a))
    amax = y.view(y.shape[0] // a, a, y.shape[1] // b, b).abs().amax((1, 3)).double()
    scale = torch.floor(torch.log2(top / amax))
    return torch.where(amax == 0, 1.0, scale.clamp(max=2.0**127)).float()


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


