from labkit.answers import Edit

WRONG = [
    Edit("whole + divided / t", "(whole + divided) / t", told="10 of the 34"),
    Edit("(whole + divided) / t if sequence_parallel else ", "", told="cut over the sequence"),
    Edit("(24 * h + 5 * a * s)", "(24 * h)", told="scores are missing"),
    Edit("10 * s * b * h", "8 * s * b * h", told="masks are bytes"),
    Edit("10 * s * b * h", "6 * s * b * h", ("(24 * h", "(28 * h"), told="what f copies"),
    Edit("h + 5 * a * s", "h + 5 * (h / 128) * s", told="heads of 128 features"),
    Edit("b * h, (24 * h + 5 * a * s) * s * b", "h, (24 * h + 5 * a * s) * s", told="You count one sequence"),
    Edit("h, (24 * h + 5 * a * s) * s * b", "h, 24 * h * s * b + 5 * a * s * s", told="scores of one sequence"),
    # twice
    Edit("10 * s * b * h, (24 * h + 5 * a * s)", "2 * 10 * s * b * h, 2 * (24 * h + 5 * a * s)", told="bytes already"),
]


# %% right: the two formulas of the paper
def activation_bytes(s, b, h, a, t, sequence_parallel):
    if sequence_parallel:
        return s * b * h * (34 + 5 * a * s / h) / t
    return s * b * h * (10 + 24 / t + 5 * a * s / h / t)


# %% right: what is whole and what is cut, tensor by tensor
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    whole = 4 * 2 * n + 2 * n
    cut = (4 + 2 + 2 + 8 + 8) * n + (2 + 1 + 2) * a * s * s * b
    return cut / t + whole / (t if sequence_parallel else 1)


# %% right: a table of (bytes, divided or not)
def activation_bytes(s, b, h, a, t, sequence_parallel):
    table = [(2, 0), (2, 0), (4, 1), (2, 1), (5 * a * s / h, 1), (2, 1), (1, 0), (2, 0), (2, 0), (8, 1), (8, 1), (1, 0)]
    return sum(n / (t if cut or sequence_parallel else 1) for n, cut in table) * s * b * h


# %% right: row by row of the table, in numpy
import numpy as np


def activation_bytes(s, b, h, a, t, sequence_parallel):
    rows = np.array([2, 2, 4, 2, 5 * a * s / h, 2, 1, 2, 2, 8, 8, 1]) * s * b * h
    cut = np.array([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0], dtype=bool)
    cut |= bool(sequence_parallel)
    return np.where(cut, rows / t, rows).sum()


# %% wrong: all heads on every rank
# told: heads are divided
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    return n * 34 / t + 5 * a * s * s * b if sequence_parallel else n * (10 + 24 / t) + 5 * a * s * s * b


# %% wrong: dropout cut
# told: behind the sum
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 8 * n / (t if sequence_parallel else 1) + 26 * n / t + sc / t


# %% wrong: flag the wrong way round
# told: the wrong way round
def activation_bytes(s, b, h, a, t, sequence_parallel):
    whole, divided = 10 * s * b * h, (24 * h + 5 * a * s) * s * b
    return whole + divided / t if sequence_parallel else (whole + divided) / t


# %% wrong: gathered inputs whole
# told: inputs of the column layers whole
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return (6 * n / t + 4 * n if sequence_parallel else 10 * n) + 24 * n / t + sc / t


# %% wrong: proj input whole
# told: input of a row layer is cut
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 12 * n / (t if sequence_parallel else 1) + 22 * n / t + sc / t


# %% wrong: scores cut twice
# told: divided twice
def activation_bytes(s, b, h, a, t, sequence_parallel):
    scores = 5 * a * s * s * b / t
    if sequence_parallel:
        return 34 * s * b * h / t + scores / t
    return s * b * h * (10 + 24 / t) + scores


# %% wrong: sp only norms
# told: by tokens than norms
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return (6 * n + 4 * n / (t if sequence_parallel else 1)) + 24 * n / t + sc / t


# %% wrong: term not times n
# told: is per s b h, too
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 10 * n / (t if sequence_parallel else 1) + 24 * n / t + 5 * a * s / h / t
