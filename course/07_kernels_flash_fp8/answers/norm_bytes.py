from labkit.answers import Edit

WRONG = [
    Edit("(2 + 1 + 2 + 2)", "4", told="also *writes*"),
    Edit("(2 + 1 + 2 + 2)", "5", told="`* gamma` is an operation of its own"),
    Edit("(2 + 1 + 2 + 2)", "8", told="one number a row"),
    Edit("2 * whole}", "3 * whole}", told="keep the row on the chip"),
    Edit("* element_size", "", told="In bytes"),
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
# told: Count tensors of the full size only
def norm_bytes(rows, cols, element_size):
    e = 2*rows*cols + rows*cols + rows + 2*rows + 2*rows + 2*rows*cols + rows + 2*rows*cols + cols
    return {'eager': e*element_size, 'fused': (2*rows*cols+cols)*element_size}


# %% wrong: counts what is written
# told: also *reads*
def norm_bytes(rows, cols, element_size):
    t = rows * cols * element_size
    return {'eager': 3*t, 'fused': t}
