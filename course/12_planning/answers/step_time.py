from labkit.answers import Edit

_BUBBLE = "(1 + (p - 1) / (v * m))"
_SHARE, _RATE = "(p - 1) / (v * m)", "(gpus * m * peak * reached)"

WRONG = [
    Edit("square / 2", "square", mistake="That is the whole square of attention. Megatron's convention counts the half that a causal mask shows."),
    Edit(_RATE, "(gpus * peak * reached)", mistake="That is the time of all microbatches; a rank computes one of m at a time."),
    Edit("(3 if full else 2) * forward", "2 * forward", mistake="Full recompute runs the forward pass a second time."),
    Edit("(3 if full else 2) * forward", "(2 if full else 1) * forward", mistake="A backward pass has twice the products of the forward pass: it takes twice as long."),
    Edit("3 * batch * sample / (seconds", "(4 if full else 3) * batch * sample / (seconds", ("mfu * 4 / 3 if full else mfu", "mfu"), mistake="What is computed a second time counts in the HFU, not in the MFU."),
    Edit("mfu * 4 / 3 if full else mfu", "mfu", mistake="With full recompute the GPU computes a forward pass more than the model needs: the HFU counts it."),
    Edit(f" * {_BUBBLE}", "", mistake="The bubble is missing."),
    Edit("/ (v * m))", "/ m)", mistake="While the pipeline fills, a rank waits for passes of single chunks: each takes one v-th of a microbatch's time."),
    Edit("backward + waits", "backward", mistake="A microbatch takes `waits` seconds longer."),
    Edit(f"m * (forward + backward + waits) * {_BUBBLE}", f"m * ((forward + backward) * {_BUBBLE} + waits)", mistake="While a rank waits for messages in a microbatch, the ranks behind it wait, too: the bubble is a share of all of a microbatch's time."),
    Edit("gradients - backward", "gradients", mistake="Gradients travel while the last backward pass still computes: only what takes longer is waited for."),
    Edit("gradients - backward", "gradients - backward / v", mistake="Gradients travel while the last microbatch goes back through all chunks of the rank, not through one."),
    Edit("gradients - backward", "gradients - backward - waits", mistake="Gradients travel while the rank computes its last backward pass. In the `waits` seconds it does not compute."),
    Edit("backward + waits", "backward + 2 * waits", mistake="`waits` are the seconds of both passes of a microbatch together."),
    Edit(_RATE, "(gpus * m * peak)"),
    Edit(_SHARE, f"({_SHARE} if m > p else 0)"),
    Edit("/ (v * m))", "/ (v * m + p - 1))"),
    Edit("sample = matrices + square / 2", "sample = matrices"),
    Edit("(seconds * gpus * peak)", "(seconds * gpus * peak * reached)"),
    Edit(_RATE, "(m * peak * reached)"),
    Edit(_SHARE, f"min(1, {_SHARE})", mistake="With few microbatches the bubble is longer than the work: filling the pipeline takes p - 1 passes, whatever m is."),
    Edit("gradients - backward", "gradients - m * backward", mistake="A gradient is complete after the last microbatch. What travels behind earlier backward passes would be half of a sum."),
    Edit("gradients - backward", "gradients - 2 * forward", mistake="With full recompute the backward pass runs the forward pass again: messages travel meanwhile, too."),
    Edit("max(0.0, gradients - backward)", "gradients - backward"),
    Edit("max(0.0, gradients - backward)", "0.0"),
]

RIGHT = [
    Edit("sample = matrices + square / 2", "sample = 0.5 * (2 * matrices + square)"),
    Edit(f"m * (forward + backward + waits) * {_BUBBLE}", "(m + (p - 1) / v) * (forward + backward + waits)"),
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
