from labkit.answers import Edit

WRONG = [
    Edit("14 * parameters", "16 * parameters", mistake="A checkpoint holds no gradients: a step begins without them."),
    Edit("14 * parameters", "18 * parameters", mistake="A checkpoint holds no gradients: a step begins without them."),
    Edit("14 * parameters", "12 * parameters", mistake="The bf16 weights are missing. (They could be rounded again, but here they are saved.)"),
    Edit("14 * parameters", "2 * parameters", mistake="These are the weights alone. To go on training a run needs the fp32 copy and the optimizer's " "averages."),
    Edit("(ranks * gigabytes * 1e9)", "(gigabytes * 1e9)", mistake="All ranks write at once, each its share."),
    Edit("gpu_hours * 3600 / ranks", "gpu_hours * 3600", mistake="That is one GPU. Of many, the first that fails ends the run."),
    Edit("gpu_hours * 3600 / ranks", "gpu_hours / ranks", mistake="Hours and seconds are mixed: all answers are in seconds."),
    Edit("every / (2 * failures)", "every / failures", mistake="A failure comes, on average, in the middle between two saves: half an interval is lost."),
    Edit("seconds / every + every / (2 * failures)", "seconds / every", mistake="What failures undo is lost, too."),
    Edit("seconds / every + every / (2 * failures)", "every / (2 * failures)", mistake="The seconds in which the run saves are lost, too."),
    Edit("math.sqrt(2 * seconds * failures)", "math.sqrt(seconds * failures)", mistake="At the best interval the two losses are equal; here they are not."),
    Edit("math.sqrt(2 * seconds * failures)", "2 * seconds * failures", mistake="That is the square of an interval."),
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


# %% wrong: lost at the best interval
# mistake: This is the share at the best interval. The run saves every `every` seconds.
# the share is that at the best interval
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    size = 14 * parameters
    seconds = size / (ranks * gigabytes * 1e9)
    between = gpu_hours * 3600 / ranks
    best = math.sqrt(2 * seconds * between)
    return {"bytes": size, "seconds": seconds, "between_failures": between, "lost": seconds / best + best / (2 * between), "best": best}


