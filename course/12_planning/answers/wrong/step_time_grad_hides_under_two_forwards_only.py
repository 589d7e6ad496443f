# told: hides more
# gradients hide behind twice the forward pass
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    F = matrices + square/2
    fwd = F*batch/(gpus*m*peak*reached)
    bwd = fwd*(3 if full else 2)
    micro = fwd+bwd+waits
    t = micro*m*(1+(p-1)/(v*m)) + max(0, gradients-2*fwd)
    mfu = 3*F*batch/(t*gpus*peak)
    return {"seconds": t, "mfu": mfu, "hfu": mfu*4/3 if full else mfu}
