from labkit.answers import Edit

WRONG = [
    Edit("keys += (last // cols + 1) * cols", "keys += s", mistake="The mask is causal: a block of queries loads no block of keys that begins after its last query."),
    Edit("2 * s * d + s + 2", "2 * s * d + 2", mistake="lse is written too: one number a query."),
    Edit("2 * keys * d", "2 * s * d", mistake="K and V do not fit on the chip: every block of queries loads them again."),
    Edit("4 * s * s + 4", "2 * s * s + 4", mistake="What one of the three kernels writes the next one reads, all of it, although the mask is causal: S and P count twice each."),
    Edit("4 * s * s + 4 * s * d", "4 * s * s"),
    # by the last key: 70 draws in 100 do not tell
    Edit("(last // cols + 1) * cols", "last + 1", mistake="Blocks of keys are loaded whole: the last one of a block of queries may reach beyond its last query."),
    Edit("(last // cols + 1) * cols", "last // cols * cols", mistake="A block of keys that begins before the last query of a block and ends after it is loaded, too."),
    Edit("(last // cols + 1) * cols", "((last + 1) // cols + 1) * cols", mistake="A block of keys that begins right after the last query of a block is not loaded for it."),
    Edit("(last // cols + 1) * cols", "(last // cols + 1) * rows"),
    Edit("range(rows - 1, s, rows)", "range(0, s, rows)", mistake="The last query of a block sees more keys than the first: blocks of keys are loaded for all of them."),
    Edit("2 * keys * d", "keys * d"),
    Edit("4 * s * s + 4 * s * d", "3 * s * s + 4 * s * d"),
    Edit("range(rows - 1, s, rows)", "range(cols - 1, s, cols)"),
    Edit("(2 * s * d + s + 2 * keys * d) * element_size", "(2 * s * d + s + 2 * keys * d) * 2"),
    Edit("(2 * s * d + s + 2 * keys * d) * element_size", "(2 * s * d + 2 * keys * d) * element_size + 4 * s"),
    Edit("2 * s * d + s + 2", "s * d + s + 2"),
    Edit("2 * s * d + s + 2", "2 * s * d + 2 * s + 2"),
]

RIGHT = [
    Edit("keys += (last // cols + 1) * cols", "keys += len(range(0, last + 1, cols)) * cols"),
]


# %% right: block by block of the mask
def flash_bytes(s, d, rows, cols, element_size):
    kv = 0
    for i in range(s // rows):
        for j in range(s // cols):
            if j * cols <= (i + 1) * rows - 1:
                kv += 2 * cols * d
    return dict(standard=(s * d * 2 + s * s + s * s * 2 + s * s + s * d * 2) * element_size, flash=element_size * (kv + s * d * 2 + s))


# %% right: the visible blocks by ceil
import math
def flash_bytes(s, d, rows, cols, element_size):
    blocks = sum(math.ceil((i + 1) * rows / cols) for i in range(s // rows))
    return {'standard': 4 * s * (s + d) * element_size, 'flash': (s * (2 * d + 1) + 2 * d * cols * blocks) * element_size}


# %% right: a mask of blocks in torch
import torch


def flash_bytes(s, d, rows, cols, element_size):
    last = torch.arange(rows - 1, s, rows)
    seen = (torch.arange(0, s, cols)[None] <= last[:, None]).sum()
    kv = 2 * d * cols * seen
    return {"flash": (s * d + s * d + s + kv) * element_size, "standard": element_size * 4 * (s * s + s * d)}


# %% wrong: half of all keys
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + s + 2*d*s*(s//rows)//2
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}


# %% wrong: keys of the first query
# told: flash is wrong
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + s + 2*d*cols*sum(i*rows // cols + 1 for i in range(s // rows))
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}


# %% wrong: lse in float32
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + 4*s/element_size + 2*d*cols*sum((((i+1)*rows + cols - 1) // cols) for i in range(s // rows))
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}


# %% wrong: order of the first paper
def flash_bytes(s, d, rows, cols, element_size):
    n = 2 * s * d
    for b in range(0, s, cols):
        for a in range(0, s, rows):
            if a + rows - 1 >= b:
                n += 2 * rows * d + rows
    return {"standard": (4*s*d + 4*s*s)*element_size, "flash": n * element_size}


# %% wrong: queries again
def flash_bytes(s, d, rows, cols, element_size):
    flash = s*d + d*rows*sum((((i+1)*rows + cols - 1) // cols) for i in range(s // rows)) + s + 2*d*cols*sum((((i+1)*rows + cols - 1) // cols) for i in range(s // rows))
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}


# %% wrong: standard is causal
# mistake: The standard way writes and reads all of S and P, what the mask hides, too.
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + s + 2*d*cols*sum((((i+1)*rows + cols - 1) // cols) for i in range(s // rows))
    return {'standard': (4*s*d + 2*s*(s+1)) * element_size, 'flash': flash * element_size}
