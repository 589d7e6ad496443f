# told:
# a bubble of exactly that share is rounded up by the last bit
import math


def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    share = percent / 100 - 1e-9
    return {"days": 6 * parameters * tokens / gpus / tflops / 1e12 / 86400, "microbatches": math.ceil((p - 1) / (v * share)),
            "checkpoint": 14 * parameters, "smallest": math.ceil(16 * parameters / 80e9), "tokens": 4.5 * h}
