# the best interval by bisection on the slope
def costs(parameters, ranks, gigabytes, gpu_hours, every):
    seconds = 14 * parameters / 1e9 / gigabytes / ranks
    failures = gpu_hours * 3600 / ranks
    low, high = 0.0, 2 * (seconds + failures) + 1
    for _ in range(200):
        middle = (low + high) / 2
        if middle == 0 or -seconds / middle**2 + 1 / (2 * failures) < 0:
            low = middle
        else:
            high = middle
    return {"bytes": 14 * parameters, "seconds": seconds, "between_failures": failures,
            "lost": seconds / every + every / (2 * failures), "best": high}
