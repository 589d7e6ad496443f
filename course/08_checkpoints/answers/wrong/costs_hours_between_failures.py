# told: Hours and seconds
# one answer in hours
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours / ranks
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / every + every / (2 * between * 3600), "best": math.sqrt(2 * seconds * between * 3600)}
