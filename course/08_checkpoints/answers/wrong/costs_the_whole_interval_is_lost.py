# told: half an interval
# formula and best interval without the half
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours * 3600 / ranks
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / every + every / between, "best": math.sqrt(seconds * between)}
