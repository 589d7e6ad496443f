from labkit.answers import Edit, Same

_TWO = "    return bad_samples(replay, samples[:half]) + bad_samples(replay, samples[half:])\n"

WRONG = [
    Edit("    half = len(samples) // 2\n" + _TWO, "    return [one for one in samples if math.isnan(replay([one]))]\n", told="replays for"),
    Edit(_TWO, "    left = bad_samples(replay, samples[:half])\n    return left or bad_samples(replay, samples[half:])\n", mistake="Where one half has a bad sample, the other half may have another."),
    Edit(_TWO, "    return bad_samples(replay, samples[:half])\n", told="missing: "),
    Edit("    if len(samples) == 1:\n        return list(samples)\n", "    if len(samples) <= 2:\n        return list(samples)\n", told="though not bad: 1"),
    Edit("    if not math.isnan(replay(samples)):\n        return []\n", "    if replay(samples) == replay(samples):\n        return []\n", told="replays for"),
    Edit("if not math.isnan(replay(samples))", "if replay(samples) != math.nan", mistake="NaN differs from every number, itself too: only math.isnan finds it."),
    Edit("samples[half:]", "samples[half + 1 :]", told="missing: | a replay is of some"),
    Edit("    if not math.isnan(replay(samples)):\n        return []\n    if len(samples) == 1:\n        return list(samples)\n",
         "    if len(samples) == 1:\n        return list(samples) if math.isnan(replay(samples)) else []\n", told="replays for"),
    Edit("        return list(samples)\n    half = len(samples) // 2\n" + _TWO,
         "        return list(samples)\n    for one in samples:\n        rest = [s for s in samples if s != one]\n        if not math.isnan(replay(rest)):\n            return [one]\n    return []\n",
         told="replays for | missing: "),
]

EQUIVALENT = [
    Same("line 10: rounded up for down", "the larger half may be either; r is rounded up"),
]


# %% right: a list of groups
import math


def bad_samples(replay, samples):
    groups, found = [list(samples)], []
    while groups:
        group = groups.pop()
        if math.isfinite(replay(group)):
            continue
        if len(group) == 1:
            found += group
        else:
            middle = (len(group) + 1) // 2
            groups += [group[:middle], group[middle:]]
    return found


# %% right: what is known of one half is not asked
def bad_samples(replay, samples):
    def is_bad(some):
        loss = replay(some)
        return loss != loss

    def among(some):  # at least one is bad
        if len(some) == 1:
            return some
        left, right = some[: len(some) // 2], some[len(some) // 2 :]
        if not is_bad(left):
            return among(right)
        return among(left) + (among(right) if is_bad(right) else [])

    return among(list(samples)) if is_bad(samples) else []


# %% right: level by level
import math


def bad_samples(replay, samples):
    level = [samples] if math.isnan(replay(samples)) else []
    while any(len(group) > 1 for group in level):
        below = []
        for group in level:
            if len(group) == 1:
                below.append(group)
                continue
            for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                if math.isnan(replay(half)):
                    below.append(half)
        level = below
    return [group[0] for group in level]
