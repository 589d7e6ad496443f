# numpy and fractions
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
