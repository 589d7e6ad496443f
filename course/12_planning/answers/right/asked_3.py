# floats
def asked(parameters, tokens, gpus, tflops, p, v, percent, h):
    import math
    return {
        "days": 6*parameters*tokens/(gpus*tflops*1e12)/86400,
        "microbatches": max(1, math.ceil((p-1)/v/(percent/100))),
        "checkpoint": 14*parameters,
        "smallest": math.ceil(16*parameters/80e9),
        "tokens": 4.5*h,
    }
