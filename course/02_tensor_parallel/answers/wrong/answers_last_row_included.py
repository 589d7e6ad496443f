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
