from labkit.answers import Edit, Same

_DIVIDES = "it divides without rest, and 8.0 is as good as 8"
_EVEN = "a model's hidden size is even: 4.5 times it is a whole number"

WRONG = [
    Edit(
        "sorted({q // (heads // groups) for q in queries})",
        "list(range(rank * groups // tp, rank * groups // tp + groups // tp))",
        mistake="A rank uses the key/value heads of all its queries: that may be several, and several ranks may " "use the same key/value head.",
    ),
    Edit(
        "[[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)]",
        "[[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]",
        mistake="One cut through the stack gives rank 0 only gates. A rank needs the same rows of both halves: " "two ranges.",
    ),
    Edit("2 * layers + 1", "2 * layers", mistake="The embedding is summed too."),
    Edit("2 * layers + 1", "4 * layers + 1", mistake="Forward only: two sums a layer, one for each pair."),
    Edit("vocab / (2 * 3)", "vocab / 3", mistake="A ring all-reduce of n bytes sends twice what an all-gather of n bytes does."),
    Edit("3 * 12 * hidden**2", "2 * 12 * hidden**2", mistake="ZeRO-3 moves the weights three times: gathered forward and backward, gradients scattered."),
]

RIGHT = [
    Edit("range(rank * heads // tp, (rank + 1) * heads // tp)", "range(heads)[rank * (heads // tp) :][: heads // tp]"),
    Edit(
        "sorted({q // (heads // groups) for q in queries})",
        "list(dict.fromkeys(q * groups // heads for q in queries))",
    ),
    Edit("3 * 12 * hidden**2 // (8 * hidden)", "9 * hidden // 2", ("vocab / (2 * 3)", "vocab / 3 / 2")),
]

EQUIVALENT = [
    Same("line 5: rounded up for down", _DIVIDES),
    Same("line 5: rounded up for down (2)", _DIVIDES),
    Same("line 8: `/` for `//` (2)", _DIVIDES),
    Same("line 8: rounded up for down (2)", _DIVIDES),
    Same("line 9: `/` for `//`", _DIVIDES),
    Same("line 9: `/` for `//` (2)", _DIVIDES),
    Same("line 9: rounded up for down", _DIVIDES),
    Same("line 9: rounded up for down (2)", _DIVIDES),
    Same("line 12: `/` for `//`", _EVEN),
    Same("line 12: rounded up for down", _EVEN),
]


# %% right: tuples, whole numbers
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = tuple(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": tuple(dict.fromkeys(q // (heads // groups) for q in queries)),
        "gate_up_rows": tuple((half + rank * ffn // tp, half + (rank + 1) * ffn // tp) for half in (0, ffn)),
        "all_reduces_forward": 1 + layers + layers,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% right: the first whole number of tokens that sends less
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden**2 // (8 * hidden) + 1,
    }


# %% right: numpy and fractions
import numpy as np
from fractions import Fraction


def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = np.arange(rank * heads // tp, (rank + 1) * heads // tp)
    return {
        "query_heads": queries,
        "kv_heads": np.unique(queries // (heads // groups)),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": Fraction(vocab, 6),
        "zero3_sends_less_from": np.float64(4.5 * hidden) + 1,
    }


# %% wrong: both send the same
# mistake: With so many tokens both send the same. Asked is the first number with which ZeRO-3 sends less.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 4.5 * hidden,
    }


# %% wrong: four products
# mistake: tp sends 8 b s h: four all-reduces, and each sends its tensor twice.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    n, f, per = heads // tp, ffn // tp, heads // groups
    q = list(range(rank * n, (rank + 1) * n))
    return {
        "query_heads": q,
        "kv_heads": sorted({i // per for i in q}),
        "gate_up_rows": [[rank * f, (rank + 1) * f], [ffn + rank * f, ffn + (rank + 1) * f]],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden // 4 + 1,
    }


# %% wrong: group by remainder
# mistake: These are all key/value heads: asked are those that this rank's queries use.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q % groups for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: kv local numbers
# mistake: These are the heads of rank 0, or numbers that begin at 0 on each rank: asked are those of the whole model.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    n, f, per = heads // tp, ffn // tp, heads // groups
    q = list(range(rank * n, (rank + 1) * n))
    return {
        "query_heads": list(range(n)),
        "kv_heads": sorted({i // per for i in range(n)}),
        "gate_up_rows": [[rank * f, (rank + 1) * f], [ffn + rank * f, ffn + (rank + 1) * f]],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden // 8 + 1,
    }


# %% wrong: kv one for each query
# mistake: You name a key/value head once for each query that uses it: each is asked for once.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    n, f, per = heads // tp, ffn // tp, heads // groups
    q = list(range(rank * n, (rank + 1) * n))
    return {
        "query_heads": q,
        "kv_heads": [i // per for i in q],
        "gate_up_rows": [[rank * f, (rank + 1) * f], [ffn + rank * f, ffn + (rank + 1) * f]],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden // 8 + 1,
    }


# %% wrong: last row included
# mistake: Your stop is the last row; asked is the row behind it, as in Python.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp - 1] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: loss summed too
# mistake: One too many: behind the layers no s b h is summed.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 2,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: one group is the first
# mistake: With fewer groups than ranks, neighbouring ranks use the same key/value head: query q uses head q // (a/g).
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": [0] if groups < tp else sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: one number a token
# mistake: There are three numbers a token, not one.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 2,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: over three inverse
# mistake: You divide the three numbers by the logits; asked is the other way round.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    n, f, per = heads // tp, ffn // tp, heads // groups
    q = list(range(rank * n, (rank + 1) * n))
    return {
        "query_heads": q,
        "kv_heads": sorted({i // per for i in q}),
        "gate_up_rows": [[rank * f, (rank + 1) * f], [ffn + rank * f, ffn + (rank + 1) * f]],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": 6 / vocab,
        "zero3_sends_less_from": 36 * hidden // 8 + 1,
    }


# %% wrong: rows of one half
# mistake: The second half, up, begins at row ffn of the stack.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[rank * ffn // tp, (rank + 1) * ffn // tp]] * 2,
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: start and length
# mistake: These are start and length: asked is [start, stop].
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    n, f, per = heads // tp, ffn // tp, heads // groups
    q = list(range(rank * n, (rank + 1) * n))
    return {
        "query_heads": q,
        "kv_heads": sorted({i // per for i in q}),
        "gate_up_rows": [[rank * f, f], [ffn + rank * f, f]],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden // 8 + 1,
    }


# %% wrong: tokens of a rank
# mistake: These are the tokens of one rank; b s counts those of all t ranks together.
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    n, f, per = heads // tp, ffn // tp, heads // groups
    q = list(range(rank * n, (rank + 1) * n))
    return {
        "query_heads": q,
        "kv_heads": sorted({i // per for i in q}),
        "gate_up_rows": [[rank * f, (rank + 1) * f], [ffn + rank * f, ffn + (rank + 1) * f]],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden // 8 // tp + 1,
    }
