from labkit.answers import Edit

_BUBBLE = "(1 + (p - 1) / (v * m))"

WRONG = [
    Edit("square / 2", "square", told="whole square"),
    Edit("sample = matrices + square / 2", "sample = matrices", told="scores and values"),
    Edit(
        "(3 if full else 2) * forward",
        "(2 if full else 1) * forward",
        ("3 * batch", "2 * batch"),
        told="twice the products",
    ),
    Edit(
        "3 * batch * sample / (seconds",
        "(4 if full else 3) * batch * sample / (seconds",
        ("mfu * 4 / 3 if full else mfu", "mfu"),
        told="counts in the HFU",
    ),
    Edit(
        '"mfu": mfu, "hfu": mfu * 4 / 3 if full else mfu',
        '"mfu": mfu * 3 / 4 if full else mfu, "hfu": mfu',
        told="does not lose",
    ),
    Edit("mfu * 4 / 3 if full else mfu", "mfu", told="HFU counts it"),
    Edit("(seconds * gpus * peak)", "(seconds * gpus * peak * reached)", told="not of what large products"),
    Edit("(3 if full else 2) * forward", "2 * forward", told="second time"),
    Edit(f" * {_BUBBLE}", "", told="bubble is missing"),
    Edit("/ (v * m))", "/ m)", told="v chunks"),
    Edit("/ (v * m))", "/ (v * m + p - 1))", told="share of the whole time"),
    Edit("(p - 1) / (v * m)", "p / (v * m)", told="one rank"),
    Edit(
        f"m * (forward + backward + waits) * {_BUBBLE}",
        f"m * ((forward + backward) * {_BUBBLE} + waits)",
        told="ranks behind it",
    ),
    Edit("backward + waits", "backward", told="waits"),
    Edit("(gpus * m * peak * reached)", "(gpus * peak * reached)", told="one of m"),
    Edit("gradients - backward", "gradients", told="only what takes longer"),
    Edit("gradients - backward", "gradients - m * backward", told="last backward"),
    Edit("gradients - backward", "gradients - forward - backward", told="backward pass alone"),
    Edit("max(0.0, gradients - backward)", "gradients - backward", told="do not make"),
    Edit("max(0.0, gradients - backward)", "0.0", told="waited for"),
    Edit("* reached)\n    backward", ")\n    backward", told="share of the peak"),
    Edit("gradients - backward", "gradients - backward / m", told="of one microbatch"),
    Edit("(3 if full else 2) * forward", "(2 if full else 1) * forward", told="twice the products"),
    Edit("(gpus * m * peak * reached)", "(m * peak * reached)", told="by all GPUs"),
    Edit("(p - 1) / (v * m)", "min(1, (p - 1) / (v * m))", told="nothing limits"),
    Edit("(p - 1) / (v * m)", "min(p - 1, m) / (v * m)", told="nothing limits"),
    Edit("(p - 1) / (v * m)", "((p - 1) / (v * m) if m >= p else 0)", told="longest one"),
    Edit("(p - 1) / (v * m)", "((p - 1) / (v * m) if m > p else 0)", told="as many microbatches"),
    Edit("mfu * 4 / 3 if full", "mfu * 4 / 3 if True"),
    Edit("batch * sample / (gpus", "sample / (gpus"),
    Edit("(gpus * m * peak * reached)", "(gpus // p * m * peak * reached)"),
]

RIGHT = [
    Edit("sample = matrices + square / 2", "sample = 0.5 * (2 * matrices + square)"),
    Edit(f"m * (forward + backward + waits) * {_BUBBLE}", "(m + (p - 1) / v) * (forward + backward + waits)"),
    Edit("passes + max(0.0, gradients - backward)", "max(passes, passes + gradients - backward)"),
    Edit("mfu * 4 / 3 if full else mfu", "mfu * (1 + full / 3)"),
]


# %% right: the pipeline as a clock of microbatches
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    flops = {"forward": batch * (matrices + 0.5 * square)}
    flops["backward"] = 2 * flops["forward"]
    flops["again"] = flops["forward"] if full else 0.0
    rate = gpus * peak * reached
    each = {name: n / m / rate for name, n in flops.items()}
    clock = 0.0
    for _ in range(m):
        clock += sum(each.values()) + waits
    clock += (p - 1) * clock / m / v
    late = gradients - each["backward"] - each["again"]
    clock += late if late > 0 else 0
    useful = flops["forward"] + flops["backward"]
    return {"hfu": (useful + flops["again"]) / clock / gpus / peak, "mfu": useful / clock / gpus / peak, "seconds": clock}


# %% wrong: grad hides under two forwards only
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


# %% wrong: plays one microbatch
# told: one of m
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    forward = batch * (matrices + square / 2) / (gpus * peak * reached)
    backward = 3 * forward if full else 2 * forward
    seconds = m * (forward + backward + waits) * (1 + (p - 1) / (v * m)) + max(0, gradients - backward)
    mfu = 3 * batch * (matrices + square / 2) / (seconds * gpus * peak)
    return {"seconds": seconds, "mfu": mfu, "hfu": mfu * (4 / 3 if full else 1)}


# %% wrong: square whole in time
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


# %% wrong: waits twice
# told: both passes together
# each pass waits
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    F = matrices + square/2
    fwd = F*batch/(gpus*m*peak*reached)
    bwd = fwd*(3 if full else 2)
    t = (fwd+bwd+2*waits)*m*(1+(p-1)/(v*m)) + max(0, gradients-bwd)
    mfu = 3*F*batch/(t*gpus*peak)
    return {"seconds": t, "mfu": mfu, "hfu": mfu*4/3 if full else mfu}
