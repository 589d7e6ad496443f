# told: whatever cp is now
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": min(cp, groups // tp),
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }
