from labkit.answers import Edit, Same

_DIVIDES = "it divides without rest, and 8.0 is as good as 8"
_EVEN = "a model's hidden size is even: 4.5 times it is a whole number"

WRONG = [
    Edit(
        "sorted({q // (heads // groups) for q in queries})",
        "list(range(rank * groups // tp, rank * groups // tp + groups // tp))",
        told="use the same key/value head",
    ),
    Edit(
        "[[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)]",
        "[[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]",
        told="only gates",
    ),
    Edit("2 * layers + 1", "2 * layers", told="embedding is summed"),
    Edit("2 * layers + 1", "4 * layers + 1", told="Forward only"),
    Edit("vocab / (2 * 3)", "vocab / 3", told="twice what an all-gather"),
    Edit("3 * 12 * hidden**2", "2 * 12 * hidden**2", told="three times"),
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


# %% wrong: both directions
# told: Forward only
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 4 * layers + 2,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: both send the same
# told: both send the same
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


# %% wrong: equal cut of the groups
# told: same key/value head
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": list(range(rank * groups // tp, (rank + 1) * groups // tp)),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: four products
# told: tp sends 8 b s h
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
# told: all key/value heads
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
# told: heads of rank 0
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
# told: once for each query
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
# told: last row
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
# told: One too many
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


# %% wrong: one gather of weights
# told: three times
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q * groups // heads for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 12 * hidden**2 // (8 * hidden) + 1,
    }


# %% wrong: one group is the first
# told: query q uses head
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


# %% wrong: one head of several
# told: that may be several
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab):
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": [queries[0] // (heads // groups)],
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
    }


# %% wrong: one number a token
# told: not one
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
# told: other way round
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
# told: begins at row ffn
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
# told: start and length
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
# told: tokens of one rank
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
