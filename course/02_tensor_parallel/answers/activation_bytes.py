from labkit.answers import Edit

WRONG = [
    Edit("whole + divided / t", "(whole + divided) / t", mistake="Without sequence parallelism norms, dropouts and the inputs of column layers are whole on every " "rank: 10 of the 34 bytes."),
    Edit("(whole + divided) / t if sequence_parallel else ", "", mistake="With sequence parallelism the 10 bytes of norms, dropouts and inputs are cut over the sequence " "as well."),
    Edit("(24 * h + 5 * a * s)", "(24 * h)", mistake="The scores are missing: softmax output, dropout mask and dropout output, 5 a s^2 b."),
    Edit("10 * s * b * h", "8 * s * b * h", mistake="Dropout masks are bytes too: one at the end of attention, one of the MLP."),
    Edit("10 * s * b * h", "6 * s * b * h", ("(24 * h", "(28 * h"), mistake="The input of a column layer is whole on every rank: it is what f copies."),
    Edit("h + 5 * a * s", "h + 5 * (h / 128) * s", mistake="You count heads of 128 features; a is the number of heads."),
    Edit("b * h, (24 * h + 5 * a * s) * s * b", "h, (24 * h + 5 * a * s) * s", mistake="You count one sequence: a batch has b of them."),
    Edit("h, (24 * h + 5 * a * s) * s * b", "h, 24 * h * s * b + 5 * a * s * s", mistake="You count the scores of one sequence: a batch has b of them."),
    # twice
    Edit("10 * s * b * h, (24 * h + 5 * a * s)", "2 * 10 * s * b * h, 2 * (24 * h + 5 * a * s)", mistake="Twice too much: the numbers of the table are bytes already, for 16 bits."),
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
# mistake: Attention scores belong to heads, and heads are divided.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    return n * 34 / t + 5 * a * s * s * b if sequence_parallel else n * (10 + 24 / t) + 5 * a * s * s * b


# %% wrong: dropout cut
# mistake: The dropouts stand behind the sum, where every rank has the whole tensor: their masks are not cut by features.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 8 * n / (t if sequence_parallel else 1) + 26 * n / t + sc / t


# %% wrong: flag the wrong way round
# mistake: The flag is taken the wrong way round: *without* sequence parallelism 10 of the 34 bytes are whole.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    whole, divided = 10 * s * b * h, (24 * h + 5 * a * s) * s * b
    return whole + divided / t if sequence_parallel else (whole + divided) / t


# %% wrong: gathered inputs whole
# mistake: You keep the inputs of the column layers whole. With sequence parallelism a rank keeps its own tokens of them, and gathers them again.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return (6 * n / t + 4 * n if sequence_parallel else 10 * n) + 24 * n / t + sc / t


# %% wrong: proj input whole
# mistake: The input of a row layer is cut by features: a rank has the results of its own heads, or of its own features of the MLP.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 12 * n / (t if sequence_parallel else 1) + 22 * n / t + sc / t


# %% wrong: scores cut twice
# mistake: The scores are divided twice: they belong to heads, and a rank has a/t.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    scores = 5 * a * s * s * b / t
    if sequence_parallel:
        return 34 * s * b * h / t + scores / t
    return s * b * h * (10 + 24 / t) + scores


# %% wrong: sp only norms
# mistake: With sequence parallelism more is cut by tokens than norms: all that lies between the pairs.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return (6 * n + 4 * n / (t if sequence_parallel else 1)) + 24 * n / t + sc / t


# %% wrong: term not times n
# mistake: The row of the scores is per s b h, too: 5 a s/h is multiplied by s b h.
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 10 * n / (t if sequence_parallel else 1) + 24 * n / t + 5 * a * s / h / t
