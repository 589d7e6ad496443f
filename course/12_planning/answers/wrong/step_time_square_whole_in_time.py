# told: half square
# the GPU computes the whole square
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    F = matrices + square/2
    fwd = (matrices+square)*batch/(gpus*m*peak*reached)
    bwd = fwd*(3 if full else 2)
    micro = fwd+bwd+waits
    t = micro*m*(1+(p-1)/(v*m)) + max(0, gradients-bwd)
    mfu = 3*F*batch/(t*gpus*peak)
    return {"seconds": t, "mfu": mfu, "hfu": mfu*4/3 if full else mfu}
