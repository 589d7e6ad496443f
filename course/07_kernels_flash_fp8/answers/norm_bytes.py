from labkit.answers import Edit

WRONG = [
    Edit("(2 + 1 + 2 + 2)", "4", mistake="Each operation also *writes* its result (that of the mean is too small to count)."),
    Edit("(2 + 1 + 2 + 2)", "5", mistake="`* gamma` is an operation of its own: it reads a whole tensor and writes one."),
    Edit("(2 + 1 + 2 + 2)", "8", mistake="The mean reads a whole tensor and writes one number a row: that does not count."),
    Edit("2 * whole}", "3 * whole}", mistake="One kernel could keep the row on the chip between its two uses."),
    Edit("* element_size", "", mistake="In bytes, not numbers."),
    Edit("* element_size", "* 4"),
]


# %% right: 2 and 7 passes over the tensor
def norm_bytes(rows, cols, element_size):
    n = rows * cols
    return dict(fused=n * element_size * 2, eager=n * 7 * element_size)


# %% right: reads and writes of every operation in lists
def norm_bytes(rows, cols, element_size):
    reads, writes = [1, 1, 1, 1], [1, 0, 1, 1]
    b = rows * cols * element_size
    return {'eager': float(b * (sum(reads) + sum(writes))), 'fused': float(2 * b)}


# %% right: math.prod
import math
def norm_bytes(rows, cols, element_size):
    return {k: math.prod((v, rows, cols, element_size)) for k, v in (('eager', 7), ('fused', 2))}


# %% wrong: counts means and gamma
# mistake: Count tensors of the full size only: no means, no roots, no gamma.
def norm_bytes(rows, cols, element_size):
    e = 2*rows*cols + rows*cols + rows + 2*rows + 2*rows + 2*rows*cols + rows + 2*rows*cols + cols
    return {'eager': e*element_size, 'fused': (2*rows*cols+cols)*element_size}


# %% wrong: counts what is written
# mistake: Each operation also *reads* a whole tensor.
def norm_bytes(rows, cols, element_size):
    t = rows * cols * element_size
    return {'eager': 3*t, 'fused': t}
