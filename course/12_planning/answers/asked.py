from labkit.answers import Edit, Same

_DAYS = "6 * parameters * tokens / (gpus * tflops * 1e12) / 86_400"
_AT_LEAST = "max(1, -(-100 * (p - 1) // (v * percent)))"
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit("6 * parameters * tokens", "2 * parameters * tokens", mistake="days: a forward pass has 2 FLOPs for each parameter and token, and the backward pass twice as " "many."),
    Edit("6 * parameters * tokens", "8 * parameters * tokens", mistake="days: 8 FLOPs count what full recompute does; the TFLOP/s are model FLOPs."),
    Edit(_DAYS, _DAYS.replace(" / 86_400", ""), mistake="days: these are seconds."),
    Edit("86_400", "3_600", mistake="days: these are hours."),
    Edit("-(-100 * (p - 1) // (v * percent))", "100 * (p - 1) // (v * percent)", mistake="microbatches: rounded down, the bubble is larger than what is allowed."),
    Edit("-(-100 * (p - 1) // (v * percent))", "round(100 * (p - 1) / (v * percent))", mistake="microbatches: rounded down, the bubble is larger than what is allowed."),
    Edit("-(-100 * (p - 1) // (v * percent))", "100 * (p - 1) // (v * percent) + 1", mistake="microbatches: exactly that share is allowed."),
    Edit("// (v * percent))", "// percent)", mistake="microbatches: v chunks make the bubble smaller."),
    Edit(_AT_LEAST, "-(-100 * (p - 1) // (v * percent))", mistake="microbatches: of one rank, too, a step has a microbatch."),
    Edit(_AT_LEAST, "-(-100 * (p - 1) // (v * percent)) or -1", mistake="microbatches: of one rank, too, a step has a microbatch."),
    Edit("(gpus * tflops * 1e12)", "(tflops * 1e12)", mistake="days: `tflops` are those of each GPU, and all of them compute."),
    Edit("-(-100 * (p - 1)", "-(-100 * p", mistake="microbatches: a pipeline of p ranks has a bubble of p - 1 passes."),
    Edit("14 * parameters", "16 * parameters", mistake="checkpoint: it holds no gradients."),
    Edit("14 * parameters", "18 * parameters", mistake="checkpoint: it holds no gradients."),
    Edit("14 * parameters", "12 * parameters", mistake="checkpoint: the weights are missing."),
    Edit("14 * parameters", "2 * parameters", mistake="checkpoint: to go on, a run needs the main parameters and the moments, too."),
    Edit("-(-16 * parameters // 80_000_000_000)", "16 * parameters // 80_000_000_000", mistake="smallest: rounded down, it does not fit."),
    Edit("-16 * parameters", "-18 * parameters", mistake="smallest: here gradients have 2 bytes."),
    Edit("-16 * parameters", "-14 * parameters", mistake="smallest: the gradients are missing."),
    Edit("80_000_000_000", "(80 * 2**30)", mistake="smallest: 80 GB are 80e9 bytes."),
    Edit("9 * h // 2", "6 * h", mistake="tokens: numbers are counted, whatever bytes they have; ZeRO-3 sends three times 12 h^2, tp eight" " payloads."),
    Edit("9 * h // 2", "9 * h", mistake="tokens: four all-reduces send eight payloads; ten are sent with sequence parallelism."),
    Edit("9 * h // 2", "3 * h", mistake="tokens: ZeRO-3 gathers weights twice and scatters gradients once: three times 12 h^2."),
    Edit("9 * h // 2", "36 * h * h", mistake="tokens: at how many tokens is 8 tokens h 36 h^2?"),
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
# mistake: smallest: what fills the last GPU exactly fits.
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


# %% wrong: multiple of p
# mistake: microbatches: asked is the smallest number, whether or not p divides it.
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
# mistake: microbatches: asked is the bubble as a share of the work, not of the whole step.
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
# %% wrong: in floats
# a bubble of exactly that share is rounded up by the last bit
import math


def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    share = percent / 100 - 1e-9
    return {"days": 6 * parameters * tokens / gpus / tflops / 1e12 / 86400, "microbatches": math.ceil((p - 1) / (v * share)),
            "checkpoint": 14 * parameters, "smallest": math.ceil(16 * parameters / 80e9), "tokens": 4.5 * h}


