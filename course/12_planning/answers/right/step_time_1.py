# the pipeline as a clock of microbatches
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
