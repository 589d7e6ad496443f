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
