# told: the output is exchanged
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": 2 * cp * groups / (heads + 2 * groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }
