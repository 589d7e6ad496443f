# told: at the best interval
# the share is that at the best interval
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours * 3600 / ranks
    best = math.sqrt(2 * seconds * between)
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / best + best / (2 * between), "best": best}
