from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "groups * element_size * flops / (heads",
        "groups * element_size * flops / (2 * heads",
        told="half of a block's pairs",
    ),
    Edit(
        "groups * element_size * flops / (heads * bandwidth)",
        "element_size * flops / bandwidth",
        told="the work has `heads`",
    ),
    Edit("2 * cp * tp", "2 * cp", told="again, over tp"),
    Edit("groups // tp", "heads // tp", told="fewer heads than queries"),
    Edit("groups // tp", "groups", told="tp has already divided the groups"),
    Edit(
        "groups * element_size * flops / (heads * bandwidth)",
        "-(-groups * element_size * flops // (heads * bandwidth))",
        told="not rounded",
    ),
    Edit(
        "groups * element_size * flops / (heads * bandwidth)",
        "int(groups * element_size * flops / (heads * bandwidth))",
        told="not rounded",
    ),
    Edit(
        "groups * element_size * flops / (heads",
        "tp * groups * element_size * flops / (heads",
        told="tp cuts the work and the messages alike",
    ),
    Edit(
        "groups * element_size * flops / (heads",
        "groups / tp * element_size * flops / (heads",
        told="tp cuts the work and the messages alike",
    ),
    Edit("cp * groups / (heads + groups)", "cp", told="the ring 2 groups"),
    Edit("(2 * cp - 1) / cp", "cp", told="the mean is 1/C"),
]

RIGHT = [
    Edit("(2 * cp - 1) / cp", "2 - 1 / cp"),
    # to within a token
    Edit("(2 * cp - 1) / cp", "cp * (s * (s // cp) - (s // cp) ** 2 / 2) / (s * s / 2)"),
]

EQUIVALENT = [
    Same("line 8: `/` for `//`", "tp divides groups"),
    Same("line 8: rounded up for down", "tp divides groups"),
]


# %% right: counted from tokens and bytes
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    n = s / cp
    last = sum(range(s - s // cp + 1, s + 1))
    return dict(slowest_over_mean=last / (s * (s + 1) / 2 / cp), ring_over_ulysses=2 * (cp - 1) * n * groups / ((cp - 1) / cp * n * 2 * (heads + groups)),
                largest_ulysses=groups / tp, sequence_multiple=2.0 * cp * tp, tokens_to_hide=flops / bandwidth * element_size * groups / heads)


# %% right: fractions, whole numbers
from fractions import Fraction


def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": Fraction(2 * cp - 1, cp),
        "ring_over_ulysses": Fraction(cp * groups, heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% right: the numbers of the pairs
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": max(range(cp), key=int) * 2 / cp + 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": tp * (cp + cp),
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% right: heads of a rank in place of all
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * (groups // tp) / (heads // tp + groups // tp),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * (groups / tp) / (heads / tp) / (bandwidth / flops),
    }


# %% wrong: all groups for ulysses
# told: tp has already divided
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: hide times ranks
# told: number of ranks
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": cp * element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: largest is cp
# told: whatever cp is now
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": min(cp, groups // tp),
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: largest no more than cp
# told: whatever cp is now
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": min(cp, groups // tp),
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: multiple of each by itself
# told: again, over tp
import math


def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": math.lcm(2 * cp, cp * tp),
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: multiple without zigzag
# told: again, over tp
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: multiply add is one
# told: two operations for a multiply-add
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": 2 * groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: one product
# told: two products
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": 2 * groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: ratio for as many groups
# told: queries and the output
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp / 2,
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: ratio without the output
# told: the output is exchanged
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": 2 * cp * groups / (heads + 2 * groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: ratio without the share kept
# told: keeps its own share
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": (cp - 1) * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: slowest of zigzag
# told: That is zigzag
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 1.0,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: slowest over fastest
# told: over the fastest
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 * cp - 1,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: two bytes an element
# told: not always 2
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * 2 * flops / (heads * bandwidth),
    }


# %% wrong: ulysses over ring
# told: Ulysses over the ring
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": (heads + groups) / (cp * groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }
