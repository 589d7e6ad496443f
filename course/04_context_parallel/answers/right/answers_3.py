# the numbers of the pairs
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": max(range(cp), key=int) * 2 / cp + 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": tp * (cp + cp),
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }
