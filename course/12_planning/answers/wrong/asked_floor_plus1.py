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
