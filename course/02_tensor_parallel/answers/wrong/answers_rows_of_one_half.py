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
