# NumPy: scaled to whole numbers by ldexp, rint
import numpy as np
import torch


def to_fp8(x, mantissa, lowest, top):
    a = np.clip(x.numpy().astype(np.float64), -top, top)
    exponent = np.maximum(np.frexp(a)[1] - 1, lowest)
    return torch.from_numpy(np.ldexp(np.rint(np.ldexp(a, mantissa - exponent)), exponent - mantissa)).float()
