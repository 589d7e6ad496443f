from labkit.answers import Edit

_LOST = "seconds / every + every / (2 * failures)"

WRONG = [
    Edit("14 * parameters", "2 * parameters", mistake="These are the weights alone. To go on training a run needs the fp32 copy and the optimizer's averages."),
    Edit("14 * parameters", "12 * parameters", mistake="The bf16 weights are missing. (They could be rounded again, but here they are saved.)"),
    Edit("14 * parameters", "16 * parameters", mistake="A checkpoint holds no gradients: a step begins without them."),
    Edit("14 * parameters", "18 * parameters", mistake="A checkpoint holds no gradients: a step begins without them."),
    Edit("(ranks * gigabytes * 1e9)", "(gigabytes * 1e9)", mistake="All ranks write at once, each its share."),
    Edit("1e9", "2**30", mistake="A gigabyte is 10^9 bytes here, not 2^30."),
    Edit("gpu_hours * 3600 / ranks", "gpu_hours * 3600", mistake="That is one GPU. Of many, the first that fails ends the run."),
    Edit("gpu_hours * 3600 / ranks", "gpu_hours / ranks", mistake="Hours and seconds are mixed: all answers are in seconds."),
    Edit(_LOST, "seconds / every", mistake="What failures undo is lost, too."),
    Edit(_LOST, "every / (2 * failures)", mistake="The seconds in which the run saves are lost, too."),
    Edit("every / (2 * failures)", "every / failures", mistake="A failure comes, on average, in the middle between two saves: half an interval is lost."),
    Edit(_LOST, "math.sqrt(2 * seconds / failures)", mistake="This is the share at the best interval. The run saves every `every` seconds."),
    Edit("math.sqrt(2 *", "math.sqrt(", mistake="At the best interval the two losses are equal; here they are not."),
    Edit("math.sqrt(2 * seconds * failures)", "2 * seconds * failures"),
    Edit(_LOST, "seconds / (every + seconds) + every / (2 * failures)"),
]

RIGHT = [
    Edit("math.sqrt(2 * seconds * failures)", "(2 * seconds * failures) ** 0.5"),
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
