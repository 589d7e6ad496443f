from labkit.answers import Edit

_BUBBLE = "(1 + (p - 1) / (v * m))"

WRONG = [
    Edit("square / 2", "square", mistake="That is the whole square of attention. Megatron's convention counts the half that a causal mask " "shows."),
    Edit("sample = matrices + square / 2", "sample = matrices", mistake="Attention's scores and values are missing."),
    Edit(
        "(3 if full else 2) * forward",
        "(2 if full else 1) * forward",
        ("3 * batch", "2 * batch"),
        mistake="A backward pass has twice the products of the forward pass.",
    ),
    Edit(
        "3 * batch * sample / (seconds",
        "(4 if full else 3) * batch * sample / (seconds",
        ("mfu * 4 / 3 if full else mfu", "mfu"),
        mistake="What is computed a second time counts in the HFU, not in the MFU.",
    ),
    Edit(
        '"mfu": mfu, "hfu": mfu * 4 / 3 if full else mfu',
        '"mfu": mfu * 3 / 4 if full else mfu, "hfu": mfu',
        mistake="The MFU does not lose by recompute but by the time that it takes: model FLOPs stay the same.",
    ),
    Edit("mfu * 4 / 3 if full else mfu", "mfu", mistake="With full recompute the GPU computes a forward pass more than the model needs: the HFU counts " "it."),
    Edit("(seconds * gpus * peak)", "(seconds * gpus * peak * reached)", mistake="Both are shares of the peak, not of what large products reach."),
    Edit("(3 if full else 2) * forward", "2 * forward", mistake="What is computed a second time counts in the HFU, not in the MFU."),
    Edit(f" * {_BUBBLE}", "", mistake="The bubble is missing."),
    Edit("/ (v * m))", "/ m)", mistake="With v chunks the bubble is smaller."),
    Edit("/ (v * m))", "/ (v * m + p - 1))", mistake="That is the share of the whole time. As a share of the work the bubble is larger."),
    Edit("(p - 1) / (v * m)", "p / (v * m)", mistake="A pipeline of one rank has no bubble."),
    Edit(
        f"m * (forward + backward + waits) * {_BUBBLE}",
        f"m * ((forward + backward) * {_BUBBLE} + waits)",
        mistake="While a rank waits for messages in a microbatch, the ranks behind it wait, too: the bubble is a " "share of all of a microbatch's time.",
    ),
    Edit("backward + waits", "backward", mistake="While a rank waits for messages in a microbatch, the ranks behind it wait, too: the bubble is a " "share of all of a microbatch's time."),
    Edit("(gpus * m * peak * reached)", "(gpus * peak * reached)", mistake="That is the time of all microbatches; a rank computes one of m at a time."),
    Edit("gradients - backward", "gradients", mistake="Gradients travel while the last backward pass still computes: only what takes longer is waited " "for."),
    Edit("gradients - backward", "gradients - m * backward", mistake="Gradients travel while the last backward pass still computes: only what takes longer is waited " "for."),
    Edit("gradients - backward", "gradients - forward - backward", mistake="Gradients hide behind the backward pass alone."),
    Edit("max(0.0, gradients - backward)", "gradients - backward", mistake="Gradients that are fast do not make a step shorter."),
    Edit("max(0.0, gradients - backward)", "0.0", told="waited for"),
    Edit("* reached)\n    backward", ")\n    backward", mistake="Products reach a share of the peak, `reached`; at the peak itself they would be faster."),
    Edit("gradients - backward", "gradients - backward / m", mistake="`m` is in the backward pass already: it is that of one microbatch."),
    Edit("(3 if full else 2) * forward", "(2 if full else 1) * forward", mistake="A backward pass has twice the products of the forward pass."),
    Edit("(gpus * m * peak * reached)", "(m * peak * reached)", mistake="The FLOPs of a microbatch are shared by all GPUs."),
    Edit("(p - 1) / (v * m)", "min(1, (p - 1) / (v * m))", mistake="With fewer microbatches than ranks the bubble is more than the work, p - 1 passes: nothing " "limits it."),
    Edit("(p - 1) / (v * m)", "min(p - 1, m) / (v * m)", mistake="With fewer microbatches than ranks the bubble is more than the work, p - 1 passes: nothing " "limits it."),
    Edit("(p - 1) / (v * m)", "((p - 1) / (v * m) if m >= p else 0)", mistake="A pipeline with fewer microbatches than ranks has a bubble, too, and the longest one."),
    Edit("(p - 1) / (v * m)", "((p - 1) / (v * m) if m > p else 0)", mistake="A pipeline with as many microbatches as ranks, or fewer, has a bubble, too."),
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
# mistake: With full recompute the backward pass is longer, and hides more.
# gradients hide behind twice the forward pass
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    F = matrices + square/2
    fwd = F*batch/(gpus*m*peak*reached)
    bwd = fwd*(3 if full else 2)
    micro = fwd+bwd+waits
    t = micro*m*(1+(p-1)/(v*m)) + max(0, gradients-2*fwd)
    mfu = 3*F*batch/(t*gpus*peak)
    return {"seconds": t, "mfu": mfu, "hfu": mfu*4/3 if full else mfu}


# %% wrong: square whole in time
# mistake: The time, too, follows from model FLOPs: attention's half square.
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
# mistake: `waits` are the seconds of both passes together.
# each pass waits
def step_time(matrices, square, batch, gpus, peak, reached, p, v, m, full, waits, gradients):
    F = matrices + square/2
    fwd = F*batch/(gpus*m*peak*reached)
    bwd = fwd*(3 if full else 2)
    t = (fwd+bwd+2*waits)*m*(1+(p-1)/(v*m)) + max(0, gradients-bwd)
    mfu = 3*F*batch/(t*gpus*peak)
    return {"seconds": t, "mfu": mfu, "hfu": mfu*4/3 if full else mfu}
