from labkit.answers import Edit

_SCORES = "5 * a * s) * s * b"

WRONG = [
    Edit("whole + divided / t", "(whole + divided) / t",
         mistake="Without sequence parallelism norms, dropouts and the inputs of column layers are whole on every "
                 "rank: 10 of the 34 bytes."),
    Edit("(whole + divided) / t if sequence_parallel else ", "",
         mistake="With sequence parallelism the 10 bytes of norms, dropouts and inputs are cut over the sequence as "
                 "well."),
    Edit("(whole + divided) / t if sequence_parallel else whole + divided / t",
         "whole + divided / t if sequence_parallel else (whole + divided) / t",
         mistake="The flag is taken the wrong way round: *without* sequence parallelism 10 of the 34 bytes are whole."),
    Edit("divided / t", "divided",
         mistake="Tensor parallelism alone divides nothing here. Which rows of the table are cut by features?"),
    Edit("10 * s * b * h, (24 * h + 5", "20 * s * b * h, (48 * h + 10",
         mistake="Twice too much: the numbers of the table are bytes already, for 16 bits."),
    Edit(" + 5 * a * s)", ")",
         mistake="The scores are missing: softmax output, dropout mask and dropout output, 5 a s^2 b."),
    Edit("10 * s", "8 * s", mistake="Dropout masks are bytes too: one at the end of attention, one of the MLP."),
    Edit("10 * s * b * h, (24 * h", "8 * s * b * h, (26 * h",
         mistake="Two dropout masks lie behind the sum of a row layer, after the projection and after `fc2`: tensor "
                 "parallelism alone leaves them whole."),
    Edit("10 * s * b * h, (24 * h", "6 * s * b * h, (28 * h",
         mistake="The input of a column layer is whole on every rank: it is what f copies."),
    Edit("10 * s * b * h, (24 * h", "12 * s * b * h, (22 * h",
         mistake="The input of a row layer is cut by features: a rank has the results of its own heads, or of its own "
                 "features of the MLP."),
    Edit("10 * s * b * h, (24 * h + 5 * a * s)", "10 * s * b * h + 5 * a * s * s * b, 24 * h",
         mistake="Attention scores belong to heads, and heads are divided."),
    Edit("b * h, (24 * h + " + _SCORES, "h, (24 * h + 5 * a * s) * s",
         mistake="You count one sequence: a batch has b of them."),
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
