from labkit.answers import Edit, Same

_DAYS = "6 * parameters * tokens / (gpus * tflops * 1e12) / 86_400"
_AT_LEAST = "max(1, -(-100 * (p - 1) // (v * percent)))"
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit("6 * parameters * tokens", "2 * parameters * tokens", told="twice as many"),
    Edit("6 * parameters * tokens", "8 * parameters * tokens", told="full recompute"),
    Edit(_DAYS, _DAYS.replace(" / 86_400", ""), told="seconds"),
    Edit("86_400", "3_600", told="hours"),
    Edit("-(-100 * (p - 1) // (v * percent))", "100 * (p - 1) // (v * percent)", told="rounded down"),
    Edit("-(-100 * (p - 1) // (v * percent))", "round(100 * (p - 1) / (v * percent))", told="nearest | rounded"),
    Edit("-(-100 * (p - 1) // (v * percent))", "100 * (p - 1) // (v * percent) + 1", told="exactly that share"),
    Edit("// (v * percent))", "// percent)", told="chunks"),
    Edit(_AT_LEAST, "-(-100 * (p - 1) // (v * percent))", told="of one rank"),
    Edit(_AT_LEAST, "-(-100 * (p - 1) // (v * percent)) or -1", told="of one rank"),
    Edit("(gpus * tflops * 1e12)", "(tflops * 1e12)", told="each GPU"),
    Edit("-(-100 * (p - 1)", "-(-100 * p", told="p - 1 passes"),
    Edit("14 * parameters", "16 * parameters", told="no gradients"),
    Edit("14 * parameters", "18 * parameters", told="no gradients"),
    Edit("14 * parameters", "12 * parameters", told="weights are missing"),
    Edit("14 * parameters", "2 * parameters", told="main parameters"),
    Edit("-(-16 * parameters // 80_000_000_000)", "16 * parameters // 80_000_000_000", told="does not fit"),
    Edit("-16 * parameters", "-18 * parameters", told="have 2 bytes"),
    Edit("-16 * parameters", "-14 * parameters", told="gradients are missing"),
    Edit("80_000_000_000", "(80 * 2**30)", told="80e9"),
    Edit("9 * h // 2", "6 * h", told="numbers are counted"),
    Edit("9 * h // 2", "9 * h", told="four all-reduces"),
    Edit("9 * h // 2", "3 * h", told="scatters"),
    Edit("9 * h // 2", "36 * h * h", told="36 h^2"),
    Edit("tflops * 1e12", "tflops * 2**40"),
]

RIGHT = [
    Edit("-(-100 * (p - 1) // (v * percent))", "(100 * (p - 1) + v * percent - 1) // (v * percent)"),
    Edit(_AT_LEAST, "-(-100 * (p - 1) // (v * percent)) or 1"),
    Edit("-(-16 * parameters // 80_000_000_000)", "(parameters + 5 * 10**9 - 1) // (5 * 10**9)"),
]

EQUIVALENT = [
    Same("line 6: `//` for `/` (2)", "less than a second in days"),
    Same("line 10: `/` for `//`", _WHOLE),
    Same("line 10: rounded up for down", _WHOLE),
]


# %% right: the smallest numbers by trying, with whole numbers alone
from fractions import Fraction


def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    m = 1
    while Fraction(p - 1, v * m) > Fraction(percent, 100):
        m += 1
    flops = parameters * tokens * (2 + 4)
    return {"days": flops / gpus / tflops / 1e12 / 24 / 60 / 60, "microbatches": m, "checkpoint": (2 + 4 + 4 + 4) * parameters,
            "smallest": parameters * 16 // 80_000_000_000 + (parameters * 16 % 80_000_000_000 > 0), "tokens": 36 * h * h // (8 * h)}


# %% right: a step has one microbatch at least
def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": max(1, -(-100*(p-1)//(v*percent))),
        "checkpoint": 14*parameters,
        "smallest": -(-16*parameters//(80*10**9)),
        "tokens": 9*h//2,
    }


# %% right: floats
def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": max(1, math.ceil((p-1)/v/(percent/100))),
        "checkpoint": 14*parameters,
        "smallest": math.ceil(16*parameters/80e9),
        "tokens": 4.5*h,
    }


# %% wrong: floor plus1
# told: fits
# one more than the quotient
def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": max(1, -(-100*(p-1)//(v*percent))),
        "checkpoint": 14*parameters,
        "smallest": 16*parameters//(80*10**9)+1,
        "tokens": 9*h//2,
    }


# %% wrong: in floats
# a bubble of exactly that share is rounded up by the last bit
import math


def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    share = percent / 100 - 1e-9
    return {"days": 6 * parameters * tokens / gpus / tflops / 1e12 / 86400, "microbatches": math.ceil((p - 1) / (v * share)),
            "checkpoint": 14 * parameters, "smallest": math.ceil(16 * parameters / 80e9), "tokens": 4.5 * h}


# %% wrong: multiple of p
# told: whether or not p
# rounded up to rounds of interleaved 1F1B
def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": -(-max(1, -(-100*(p-1)//(v*percent)))//p)*p if v>1 else max(1, -(-100*(p-1)//(v*percent))),
        "checkpoint": 14*parameters,
        "smallest": -(-16*parameters//(80*10**9)),
        "tokens": 9*h//2,
    }


# %% wrong: share of step
# told: as a share of the work
# the bubble as a share of the step
def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": max(1, -(-(100-percent)*(p-1)//(v*percent))),
        "checkpoint": 14*parameters,
        "smallest": -(-16*parameters//(80*10**9)),
        "tokens": 9*h//2,
    }
