from labkit.answers import Edit

_LOST = "save / interval + (interval / 2 + restart) / between"

WRONG = [
    Edit("3600 / (gpus * failures)", "1 / (gpus * failures)", mistake="`failures` are those of a GPU in an hour: an hour has 3600 seconds."),
    Edit("3600 / (gpus * failures)", "3600 / failures", mistake="Each failure of any GPU stops all of them: more GPUs fail more often."),
    Edit("(2 * save * between) ** 0.5", "(save * between) ** 0.5", mistake="A failure costs half of an interval on the average: save / t + t / (2 between) is smallest at another t."),
    Edit("(2 * save * between) ** 0.5", "(save * between) ** 0.5", ("interval / 2 + restart", "interval + restart"), mistake="A failure comes in the middle of an interval on the average: half of it is lost."),
    Edit("(2 * save * between) ** 0.5", "(2 * save * between) ** 0.5 - save", mistake="That is Daly's interval, which counts failures during a save. Here none comes then."),
    Edit("(2 * save * between) ** 0.5", "float(round((2 * save * between) ** 0.5))", told="interval"),
    Edit(_LOST, "1 - (1 - save / interval) * (1 - (interval / 2 + restart) / between)", mistake="The shares are parts of the same time, so they add up: the goodput is 1 less all of them."),
    Edit("interval / 2 + restart", "interval + restart", mistake="A failure comes in the middle of an interval on the average: half of it is lost."),
    Edit("interval / 2 + restart", "interval / 2", mistake="After a failure the run must be started again: `restart` seconds each time."),
    Edit(_LOST, "(interval / 2 + restart) / between", mistake="Saving takes time, too: `save` seconds in each interval."),
    Edit("days / share", "days * share", mistake="The run takes longer than without failures, not shorter."),
    Edit("days / share", "days * (2 - share)"),
    Edit("(2 * save * between) ** 0.5", "between / 2"),
    Edit("(2 * save * between) ** 0.5", "3600.0"),
]

RIGHT = [
    Edit(_LOST, "(2 * save / between) ** 0.5 + restart / between"),
]


# %% right: logarithms
import math


def goodput(gpus, failures, save, restart, days):
    mean = 3600 / gpus / failures
    t = math.exp((math.log(2) + math.log(save) + math.log(mean)) / 2)
    good = 1 - t / mean - restart / mean
    return dict(interval=t, between=mean, days=days / good, goodput=good)


# %% right: the smallest of many
import numpy as np


def goodput(gpus, failures, save, restart, days):
    between = 3600 / gpus / failures
    times = np.logspace(-1, 8, 1_000_001)
    lost = save / times + (times / 2 + restart) / between
    best = int(lost.argmin())
    good = 1 - float(lost[best])
    return {"between": between, "interval": float(times[best]), "goodput": good, "days": days / good}


# %% right: a search for the interval
def goodput(gpus, failures, save, restart, days):
    between = 1 / (gpus * failures / 3600)

    def slope(t):
        return -save / t**2 + 1 / (2 * between)

    low, high = 1e-3, 1e9
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if slope(t) < 0 else (low, t)
    good = 1 - (save / t + (t / 2 + restart) / between)
    return {"between": between, "interval": t, "goodput": good, "days": days / good}
