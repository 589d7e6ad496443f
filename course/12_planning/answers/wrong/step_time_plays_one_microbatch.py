# told: one of m
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    forward = batch * (matrices + square / 2) / (gpus * peak * reached)
    backward = 3 * forward if full else 2 * forward
    seconds = m * (forward + backward + waits) * (1 + (p - 1) / (v * m)) + max(0, gradients - backward)
    mfu = 3 * batch * (matrices + square / 2) / (seconds * gpus * peak)
    return {"seconds": seconds, "mfu": mfu, "hfu": mfu * (4 / 3 if full else 1)}
