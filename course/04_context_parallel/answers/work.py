from labkit.answers import Edit, Same

_WHOLE = "2C divides s"

WRONG = [
    Edit("range(c * n + 1, (c + 1) * n + 1)", "range(c * n, (c + 1) * n)", mistake="A token also sees itself: the token at place i sees i+1 keys."),
    Edit("if zigzag else pairs", "if False else pairs[:cp]", ("2 * cp if zigzag else cp", "cp"), mistake="With zigzag rank r holds chunks r and 2C-1-r of 2C."),
    # chunks of zigzag, also where nothing needs two of them
    Edit(
        "2 * cp if zigzag else cp",
        "2 * cp",
        ("if zigzag else pairs", "if zigzag else [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)]"),
        told="hidden",
    ),
]

EQUIVALENT = [
    Same("line 4: rounded up for down", _WHOLE),
]


# %% right: closed formulas
def work(s, cp, zigzag):
    if zigzag:
        return [s * (s + 1) // 2 // cp] * cp
    n = s // cp
    return [r * n * n + n * (n + 1) // 2 for r in range(cp)]


# %% right: a numpy array
import numpy as np


def work(s, cp, zigzag):
    chunks = (np.arange(s) + 1).reshape(2 * cp if zigzag else cp, -1).sum(1)
    return chunks[:cp] + chunks[cp:][::-1] if zigzag else chunks


# %% right: a running sum over the chunks, and its differences
from itertools import accumulate


def work(s, cp, zigzag):
    chunks = 2 * cp if zigzag else cp
    n = s // chunks
    upto = [c * n * (c * n + 1) // 2 for c in range(chunks + 1)]
    chunk = [b - a for a, b in zip(upto, upto[1:])]
    if zigzag:
        return [early + late for early, late in zip(chunk[:cp], chunk[: cp - 1 : -1])]
    both = list(accumulate(chunk))
    return [both[r] - (both[r - 1] if r else 0) for r in range(cp)]


# %% right: row numbers, folded
import torch


def work(s, cp, zigzag):
    seen = torch.arange(1, s + 1)
    if zigzag:
        c = seen.view(2 * cp, -1)
        return (c[:cp] + c.flip(0)[:cp]).sum(1)
    return seen.view(cp, -1).sum(1)


# %% wrong: chunk of the second half
# mistake: The second chunk of rank r is counted from the end, 2C-1-r.
def work(s, cp, zigzag):
    h = s // (2 * cp)
    total = lambda c: sum(range(c * h + 1, (c + 1) * h + 1))
    if zigzag:
        return [total(r) + total(cp + r) for r in range(cp)]
    return [total(2 * r) + total(2 * r + 1) for r in range(cp)]


# %% wrong: contiguous backwards
# mistake: That is how many queries see each rank's keys. Asked is how many keys each rank's queries see.
def work(s, cp, zigzag):
    n = s // (2 * cp)
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(2 * cp)]
    if zigzag:
        return [pairs[r] + pairs[2 * cp - 1 - r] for r in range(cp)]
    return [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)][::-1]


# %% wrong: deals tokens one by one
# mistake: Your zigzag deals tokens one by one to the ranks. It cuts the sequence into 2C chunks.
def work(s, cp, zigzag):
    n = s // cp
    if not zigzag:
        return [sum(range(r * n + 1, (r + 1) * n + 1)) for r in range(cp)]
    return [sum(range(r + 1, s + 1, cp)) for r in range(cp)]


# %% wrong: keys of its own
# mistake: These are pairs with the rank's own keys alone: a query sees the keys of earlier tokens on all ranks.
def work(s, cp, zigzag):
    n = s // (2 * cp)
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(2 * cp)]
    if zigzag:
        return [n * (2 * n + 1)] * cp
    return [n * (2 * n + 1)] * cp


# %% wrong: no mask
# mistake: The mask is causal: a token sees nothing that comes after it.
def work(s, cp, zigzag):
    return [s // cp * s] * cp


# %% wrong: one chunk of two
def work(s, cp, zigzag):
    n = s // (2 * cp)
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(2 * cp)]
    if zigzag:
        return [2 * pairs[r] for r in range(cp)]
    return [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)]


