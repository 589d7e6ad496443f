# fractions, whole numbers
from fractions import Fraction


def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": Fraction(2 * cp - 1, cp),
        "ring_over_ulysses": Fraction(cp * groups, heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }
