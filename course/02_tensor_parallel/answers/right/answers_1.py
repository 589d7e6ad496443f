# tuples, whole numbers
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
