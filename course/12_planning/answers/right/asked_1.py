# the smallest numbers by trying, with whole numbers alone
from fractions import Fraction


def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    m = 1
    while Fraction(p - 1, v * m) > Fraction(percent, 100):
        m += 1
    flops = parameters * tokens * (2 + 4)
    return {"days": flops / gpus / tflops / 1e12 / 24 / 60 / 60, "microbatches": m, "checkpoint": (2 + 4 + 4 + 4) * parameters,
            "smallest": parameters * 16 // 80_000_000_000 + (parameters * 16 % 80_000_000_000 > 0), "tokens": 36 * h * h // (8 * h)}
