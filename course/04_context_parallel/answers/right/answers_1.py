# counted from tokens and bytes
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    n = s / cp
    last = sum(range(s - s // cp + 1, s + 1))
    return dict(slowest_over_mean=last / (s * (s + 1) / 2 / cp), ring_over_ulysses=2 * (cp - 1) * n * groups / ((cp - 1) / cp * n * 2 * (heads + groups)),
                largest_ulysses=groups / tp, sequence_multiple=2.0 * cp * tp, tokens_to_hide=flops / bandwidth * element_size * groups / heads)
