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
