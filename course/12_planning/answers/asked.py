from labkit.answers import Edit, Same

_DAYS = "6 * parameters * tokens / (gpus * tflops * 1e12) / 86_400"
_LOGITS, _CUT = "6 * s * (-(-words // (128 * tp)) * 128)", "logits: the output layer is cut by words, so each rank of tp has its part of the logits."
_TWICE = "logits: they are there twice, in bf16 and in fp32: 2 + 4 bytes."
_LEAST, _SMALLEST = "-(-100 * (p - 1) // (v * percent))", "-(-16 * parameters // 80_000_000_000)"

WRONG = [
    Edit(_DAYS, _DAYS.replace(" / 86_400", ""), mistake="days: these are seconds."),
    Edit("6 * parameters * tokens", "2 * parameters * tokens", mistake="days: a forward pass has 2 FLOPs for each parameter and token, and the backward pass twice as many."),
    Edit("(gpus * tflops * 1e12)", "(tflops * 1e12)", mistake="days: `tflops` are those of each GPU, and all of them compute."),
    Edit(_LEAST, "100 * (p - 1) // (v * percent)", mistake="microbatches: rounded down, or to the nearest, the bubble is larger than what is allowed."),
    Edit(_LEAST, "round(100 * (p - 1) / (v * percent))", mistake="microbatches: rounded down, or to the nearest, the bubble is larger than what is allowed."),
    Edit(f"max(1, {_LEAST})", _LEAST, mistake="microbatches: of one rank, too, a step has a microbatch."),
    Edit("14 * parameters", "18 * parameters", mistake="checkpoint: it holds no gradients."),
    Edit("14 * parameters", "2 * parameters", mistake="checkpoint: to go on, a run needs the main parameters and the moments, too."),
    Edit(_SMALLEST, "16 * parameters // 80_000_000_000", mistake="smallest: rounded down, it does not fit."),
    Edit("9 * h // 2", "9 * h", mistake="tokens: four all-reduces send eight payloads; ten are sent with sequence parallelism."),
    Edit("9 * h // 2", "3 * h", mistake="tokens: ZeRO-3 gathers weights twice and scatters gradients once: three times 12 h^2."),
    Edit(_LOGITS, "6 * s * words // tp", mistake="logits: the output layer has a few more words than the model, so that tp can cut them evenly (part A)."),
    Edit(_LOGITS, "6 * s * -(-words // tp)", mistake="logits: the output layer has a few more words than the model, so that tp can cut them evenly (part A)."),
    Edit(_LOGITS, "6 * s * (-(-words // 128) * 128) // tp", mistake="logits: the output layer's words are a multiple of 128 for each rank of tp, not of 128 for all of them."),
    Edit(_LOGITS, "6 * s * words", mistake=_CUT),
    Edit(_LOGITS, _LOGITS + " * tp", mistake=_CUT),
    Edit(_LOGITS, "4 * s * words // tp", mistake=_TWICE),
    Edit(_LOGITS, "2 * s * words // tp", mistake=_TWICE),
    Edit(_LOGITS, _LOGITS.replace("6", "4", 1), mistake=_TWICE),
    Edit(_LOGITS, _LOGITS.replace("6", "2", 1), mistake=_TWICE),
    Edit(_LEAST, "100 * (p - 1) // (v * percent) + 1"),
    Edit(_LEAST, f"-(-{_LEAST} // p) * p"),
    Edit(_LEAST, "-(-100 * p // (v * percent))", mistake="microbatches: the bubble is p - 1 passes of a chunk, not p."),
    Edit("// (v * percent))", "// percent)", mistake="microbatches: with v chunks a pass that is waited for is one v-th as long."),
    Edit(_LEAST, "-(-(100 - percent) * (p - 1) // (v * percent))", mistake="microbatches: that is a share of all the time. Asked is one of the work."),
    Edit(_SMALLEST, "16 * parameters // 80_000_000_000 + 1"),
    Edit("-16 * parameters", "-18 * parameters", mistake="smallest: 16 bytes a parameter are asked for, with gradients in 16 bits."),
    Edit("80_000_000_000", "(80 * 2**30)", mistake="smallest: 80 GB are 80 * 10**9 bytes; 80 * 2**30 are 80 GiB."),
    Edit("14 * parameters", "10 * parameters", mistake="checkpoint: AdamW has two moments, of 4 bytes each."),
    Edit("tflops * 1e12", "tflops * 2**40"),
]

RIGHT = [
    Edit(_LEAST, "(100 * (p - 1) + v * percent - 1) // (v * percent)"),
    Edit(_SMALLEST, "(parameters + 5 * 10**9 - 1) // (5 * 10**9)"),
]

EQUIVALENT = [
    Same("line 7: `//` for `/` (2)", "less than a second in days"),
    Same("line 11: `/` for `//`", "every division here divides evenly"),
    Same("line 11: rounded up for down", "every division here divides evenly"),
    Same("line 12: `/` for `//`", "every division here divides evenly"),
    Same("line 12: rounded up for down", "every division here divides evenly"),
]


# %% right: the smallest numbers by trying, with whole numbers alone
from fractions import Fraction


def asked(parameters, tokens, gpus, tflops, p, v, percent, h, s, words, tp):
    m = 1
    while Fraction(p - 1, v * m) > Fraction(percent, 100):
        m += 1
    flops = parameters * tokens * (2 + 4)
    return {"days": flops / gpus / tflops / 1e12 / 24 / 60 / 60, "microbatches": m, "checkpoint": (2 + 4 + 4 + 4) * parameters,
            "smallest": parameters * 16 // 80_000_000_000 + (parameters * 16 % 80_000_000_000 > 0), "tokens": 36 * h * h // (8 * h),
            "logits": sum(n * s * next(k for k in range(words, 2 * words) if k % (128 * tp) == 0) // tp for n in (2, 4))}


# %% right: floats
def asked(parameters, tokens, gpus, tflops, p, v, percent, h, s, words, tp):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": max(1, math.ceil((p-1)/v/(percent/100))),
        "checkpoint": 14*parameters,
        "smallest": math.ceil(16*parameters/80e9),
        "tokens": 4.5*h, "logits": s * math.ceil(words / 128 / tp) * 128 * 6,
    }


# %% wrong: in floats
# a bubble of exactly that share is rounded up by the last bit
import math


def asked(parameters, tokens, gpus, tflops, p, v, percent, h, s, words, tp):
    share = percent / 100 - 1e-9
    return {"days": 6 * parameters * tokens / gpus / tflops / 1e12 / 86400, "microbatches": math.ceil((p - 1) / (v * share)),
            "checkpoint": 14 * parameters, "smallest": math.ceil(16 * parameters / 80e9), "tokens": 4.5 * h, "logits": 6 * s * 128 * math.ceil(words / tp / 128)}
