from labkit.answers import Edit

WRONG = [
    Edit("14 * parameters", "16 * parameters", told="no gradients"),
    Edit("14 * parameters", "18 * parameters", told="no gradients"),
    Edit("14 * parameters", "12 * parameters", told="weights are missing"),
    Edit("14 * parameters", "2 * parameters", told="optimizer's averages"),
    Edit("(ranks * gigabytes * 1e9)", "(gigabytes * 1e9)", told="All ranks write at once"),
    Edit("gpu_hours * 3600 / ranks", "gpu_hours * 3600", told="the first that fails"),
    Edit("gpu_hours * 3600 / ranks", "gpu_hours / ranks", told="in seconds"),
    Edit("every / (2 * failures)", "every / failures", told="half an interval"),
    Edit("seconds / every + every / (2 * failures)", "seconds / every", told="What failures undo"),
    Edit("seconds / every + every / (2 * failures)", "every / (2 * failures)", told="in which the run saves"),
    Edit("math.sqrt(2 * seconds * failures)", "math.sqrt(seconds * failures)", told="are equal"),
    Edit("math.sqrt(2 * seconds * failures)", "2 * seconds * failures", told="square of an interval"),
    Edit("1e9", "2**30"),
    Edit("seconds / every + every / (2 * failures)", "seconds / (every + seconds) + every / (2 * failures)"),
]

RIGHT = [
    Edit("14 * parameters", "parameters * (2 + 4 + 4 + 4)"),
    Edit("math.sqrt(2 * seconds * failures)", "(2 * seconds * failures) ** 0.5"),
    Edit("every / (2 * failures)", "every / 2 / failures"),
    Edit("nbytes / (ranks * gigabytes * 1e9)", "nbytes / ranks / gigabytes / 10**9"),
]


# %% right: the best interval by bisection on the slope
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


# %% right: the square root by Newton's steps
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


# %% wrong: hours between failures
# told: Hours and seconds
# one answer in hours
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours / ranks
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / every + every / (2 * between * 3600), "best": math.sqrt(2 * seconds * between * 3600)}


# %% wrong: lost at the best interval
# told: at the best interval
# the share is that at the best interval
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours * 3600 / ranks
    best = math.sqrt(2 * seconds * between)
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / best + best / (2 * between), "best": best}


# %% wrong: the whole interval is lost
# told: half an interval
# formula and best interval without the half
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours * 3600 / ranks
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / every + every / between, "best": math.sqrt(seconds * between)}
