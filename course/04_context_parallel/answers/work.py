from labkit.answers import Edit, Same

_WHOLE = "2C divides s"
_BOTH = "pairs[r] + pairs[-1 - r]"

WRONG = [
    Edit("sum(range(c * n + 1, (c + 1) * n + 1))", "n * s",
         mistake="The mask is causal: a token sees nothing that comes after it."),
    Edit(f"[{_BOTH} for r in range(cp)] if zigzag else pairs", "[s // cp * (s // cp + 1) // 2] * cp",
         mistake="These are pairs with the rank's own keys alone: a query sees the keys of earlier tokens on all "
         "ranks."),
    Edit("range(c * n + 1, (c + 1) * n + 1)", "range(c * n, (c + 1) * n)",
         mistake="A token also sees itself: the token at place i sees i+1 keys."),
    Edit(_BOTH, "pairs[2 * r] + pairs[2 * r + 1]", mistake="With zigzag rank r holds chunks r and 2C-1-r of 2C."),
    Edit(_BOTH, "pairs[r] + pairs[cp + r]", mistake="The second chunk of rank r is counted from the end, 2C-1-r."),
    Edit(_BOTH, "sum(range(r + 1, s + 1, cp))",
         mistake="Your zigzag deals tokens one by one to the ranks. It cuts the sequence into 2C chunks."),
    Edit("else pairs", "else pairs[::-1]",
         mistake="That is how many queries see each rank's keys. Asked is how many keys each rank's queries see."),
    Edit(_BOTH, "2 * pairs[r]"),
    # chunks of zigzag, also where nothing needs two of them
    Edit("2 * cp if zigzag else cp", "2 * cp",
         ("if zigzag else pairs", "if zigzag else [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)]"),
         told="hidden"),
]

EQUIVALENT = [Same("line 4: rounded up for down", _WHOLE)]


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


# %% right: row numbers, folded
import torch

def work(s, cp, zigzag):
    seen = torch.arange(1, s + 1)
    if zigzag:
        c = seen.view(2 * cp, -1)
        return (c[:cp] + c.flip(0)[:cp]).sum(1)
    return seen.view(cp, -1).sum(1)
