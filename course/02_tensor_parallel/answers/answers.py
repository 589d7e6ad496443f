from labkit.answers import Edit, Same

_DIVIDES = "it divides without rest, and 8.0 is as good as 8"
_EVEN = "a model's hidden size is even: 4.5 times it is a whole number"
_MINE = "range(rank * heads // tp, (rank + 1) * heads // tp)"
_KV = "sorted({q // (heads // groups) for q in queries})"
_ROWS = "[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)"
_ALL_ITS_QUERIES = (
    "A rank uses the key/value heads of all its queries: that may be several, and several ranks may use the same "
    "key/value head."
)

WRONG = [
    Edit(_MINE, "range(heads // tp)",
         mistake="These are the heads of rank 0, or numbers that begin at 0 on each rank: asked are those of the whole "
                 "model."),
    Edit(_MINE, "range(rank, heads, tp)",
         mistake="The query heads are dealt out to the ranks one by one: a rank has a block of consecutive heads."),
    Edit(_KV, "list(range(groups))",
         mistake="These are all key/value heads: asked are those that this rank's queries use."),
    Edit(_KV, "[q // (heads // groups) for q in queries]",
         mistake="You name a key/value head once for each query that uses it: each is asked for once."),
    Edit(_KV, "sorted({q % groups for q in queries})", told="kv_heads"),
    Edit(_KV, "list(range(rank * groups // tp, rank * groups // tp + groups // tp))", mistake=_ALL_ITS_QUERIES),
    Edit(_KV, "list(range(rank * groups // tp, (rank + 1) * groups // tp))", mistake=_ALL_ITS_QUERIES),
    Edit(f"[{_ROWS}]", "[[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]",
         mistake="One cut through the stack gives rank 0 only gates. A rank needs the same rows of both halves: two "
                 "ranges."),
    Edit("(0, ffn)", "(0, 0)", mistake="The second half, up, begins at row ffn of the stack."),
    Edit("half + (rank + 1) * ffn // tp]", "ffn // tp]", mistake="These are start and length: asked is [start, stop]."),
    Edit("(rank + 1) * ffn // tp]", "(rank + 1) * ffn // tp - 1]",
         mistake="Your stop is the last row; asked is the row behind it, as in Python."),
    Edit("2 * layers + 1", "2 * layers", mistake="The embedding is summed too."),
    Edit("2 * layers + 1", "4 * layers + 1", mistake="Forward only: two sums a layer, one for each pair."),
    Edit("2 * layers + 1", "layers + 1", mistake="A layer has two pairs, attention and MLP, with a sum each."),
    Edit("vocab / (2 * 3)", "vocab / 3",
         mistake="A ring all-reduce of n bytes sends twice what an all-gather of n bytes does."),
    Edit("vocab / (2 * 3)", "vocab / 2", mistake="There are three numbers a token, not one."),
    Edit("vocab / (2 * 3)", "6 / vocab",
         mistake="You divide the three numbers by the logits; asked is the other way round."),
    Edit("3 * 12 * hidden**2 //", "2 * 12 * hidden**2 //",
         mistake="ZeRO-3 moves the weights three times: gathered forward and backward, gradients scattered."),
    Edit("// (8 * hidden) + 1", "// (8 * hidden)",
         mistake="With so many tokens both send the same. Asked is the first number with which ZeRO-3 sends less."),
    Edit("// (8 * hidden)", "// (4 * hidden)",
         mistake="tp sends 8 b s h: four all-reduces, and each sends its tensor twice."),
    Edit("// (8 * hidden)", "// (8 * hidden) // tp",
         mistake="These are the tokens of one rank; b s counts those of all t ranks together."),
    Edit("8 * hidden * (tp - 1) / tp * 2", "8 * hidden * (tp - 1) / tp",
         mistake="Messages: half of them is missing. An element has 2 bytes; four all-reduces a layer, forward and "
                 "backward together; and a ring sends each tensor twice."),
    Edit("8 * hidden * (tp - 1) / tp * 2", "4 * hidden * (tp - 1) / tp * 2", told="half of them is missing"),
    Edit("8 * hidden * (tp - 1) / tp * 2", "8 * hidden * 2",
         mistake="Messages: of a ring's all-reduce of n bytes a rank sends 2 n (t-1)/t."),
    Edit("6 * 12 * hidden**2 / tp / flops", "6 * 12 * hidden**2 / flops",
         mistake="Products: a rank makes 1/t of them."),
    Edit("6 * 12 * hidden**2 / tp / flops", "2 * 12 * hidden**2 / tp / flops",
         mistake="Products: forward and backward, which is three times the forward pass."),
    Edit("6 * 12 * hidden**2 / tp / flops", "3 * 12 * hidden**2 / tp / flops",
         mistake="Products: a multiply-add is two operations."),
    Edit("(8 * hidden * (tp - 1) / tp * 2 / bandwidth) / (6 * 12 * hidden**2 / tp / flops)",
         "(6 * 12 * hidden**2 / tp / flops) / (8 * hidden * (tp - 1) / tp * 2 / bandwidth)",
         mistake="This is computing over travelling; asked is the other way round."),
]

RIGHT = [
    Edit("sorted({q // (heads // groups) for q in queries})",
         "list(dict.fromkeys(q * groups // heads for q in queries))"),
    Edit("3 * 12 * hidden**2 // (8 * hidden)", "9 * hidden // 2", ("vocab / (2 * 3)", "vocab / 3 / 2")),
]

EQUIVALENT = [
    Same("line 6: rounded up for down", _DIVIDES),
    Same("line 6: rounded up for down (2)", _DIVIDES),
    Same("line 9: `/` for `//` (2)", _DIVIDES),
    Same("line 9: rounded up for down (2)", _DIVIDES),
    Same("line 10: `/` for `//`", _DIVIDES),
    Same("line 10: `/` for `//` (2)", _DIVIDES),
    Same("line 10: rounded up for down", _DIVIDES),
    Same("line 10: rounded up for down (2)", _DIVIDES),
    Same("line 13: `/` for `//`", _EVEN),
    Same("line 13: rounded up for down", _EVEN),
    Same("line 14: `//` for `/` (2)", _DIVIDES),
    Same("line 14: `//` for `/` (5)", _DIVIDES),
]


# %% right: tuples, whole numbers
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab, flops, bandwidth):
    queries = tuple(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": tuple(dict.fromkeys(q // (heads // groups) for q in queries)),
        "gate_up_rows": tuple((half + rank * ffn // tp, half + (rank + 1) * ffn // tp) for half in (0, ffn)),
        "all_reduces_forward": 1 + layers + layers,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 9 * hidden // 2 + 1,
        "travel_over_compute": 2 / 9 * (tp - 1) / hidden * flops / bandwidth,
    }


# %% right: numpy and fractions
import numpy as np
from fractions import Fraction
def answers(heads, groups, ffn, tp, rank, layers, hidden, vocab, flops, bandwidth):
    queries = np.arange(rank * heads // tp, (rank + 1) * heads // tp)
    return {
        "query_heads": queries,
        "kv_heads": np.unique(queries // (heads // groups)),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": Fraction(vocab, 6),
        "zero3_sends_less_from": np.float64(4.5 * hidden) + 1,
        "travel_over_compute": Fraction(16 * (tp - 1), 72 * hidden) * Fraction(flops) / Fraction(bandwidth),
    }
