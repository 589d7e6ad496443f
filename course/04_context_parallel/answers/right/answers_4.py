def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * (groups // tp) / (heads // tp + groups // tp),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * (groups / tp) / (heads / tp) / (bandwidth / flops),
    }
