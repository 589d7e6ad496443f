import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = (2 + 4 + 4 + 4) * parameters
    per_rank = size / ranks
    seconds = per_rank / (gigabytes * 1e9)
    rate = ranks / (gpu_hours * 3600.0)
    t = every
    for _ in range(200):
        t = (t + 2 * seconds / rate / t) / 2
    return {"lost": seconds / every + every * rate / 2, "best": t, "bytes": float(size), "seconds": seconds, "between_failures": 1 / rate}
