from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "groups * element_size * flops / (heads",
        "groups * element_size * flops / (2 * heads",
        mistake="That is half of it: at a step half of a block's pairs are visible, and both K and V travel.",
    ),
    Edit(
        "groups * element_size * flops / (heads * bandwidth)",
        "element_size * flops / bandwidth",
        mistake="Keys and values have `groups` heads, the work has `heads`.",
    ),
    Edit("2 * cp * tp", "2 * cp", mistake="Sequence parallelism cuts each of the 2C chunks again, over tp."),
    Edit("groups // tp", "heads // tp", mistake="Keys and values have fewer heads than queries; without copies the *groups* of a tp rank are what" " can be divided."),
    Edit("groups // tp", "groups", mistake="tp has already divided the groups: Ulysses can only divide the part that a tp rank has."),
    Edit(
        "groups * element_size * flops / (heads * bandwidth)",
        "-(-groups * element_size * flops // (heads * bandwidth))",
        mistake="tokens_to_hide is asked for not rounded.",
    ),
    Edit(
        "groups * element_size * flops / (heads * bandwidth)",
        "int(groups * element_size * flops / (heads * bandwidth))",
        mistake="tokens_to_hide is asked for not rounded.",
    ),
    Edit(
        "groups * element_size * flops / (heads",
        "tp * groups * element_size * flops / (heads",
        mistake="tp cuts the work and the messages alike: tokens_to_hide is the same for every tp.",
    ),
    Edit(
        "groups * element_size * flops / (heads",
        "groups / tp * element_size * flops / (heads",
        mistake="tp cuts the work and the messages alike: tokens_to_hide is the same for every tp.",
    ),
    Edit("cp * groups / (heads + groups)", "cp", mistake="Ulysses moves q, k, v and the output: 2 heads + 2 groups, the ring 2 groups."),
    Edit("(2 * cp - 1) / cp", "cp", mistake="The last of C contiguous pieces has (2C-1)/C^2 of the pairs, the mean is 1/C."),
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


# %% wrong: hide times ranks
# mistake: One step is compared with one block: the number of ranks is not in tokens_to_hide.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": cp * element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: largest is cp
# mistake: largest_ulysses is the largest cp that is possible, whatever cp is now.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": min(cp, groups // tp),
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: multiply add is one
# mistake: A step computes twice as much as you count: two products, and two operations for a multiply-add.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": 2 * groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: ratio for as many groups
# mistake: Keys and values have `groups` heads, queries and the output have `heads`.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp / 2,
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: ratio without the output
# mistake: In Ulysses the output is exchanged, too: 2 heads + 2 groups.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": 2 * cp * groups / (heads + 2 * groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: ratio without the share kept
# mistake: In an all-to-all a rank keeps its own share: (C-1)/C leaves, as in `bytes_per_layer`.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": (cp - 1) * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: slowest of zigzag
# mistake: That is zigzag; asked is the contiguous cut.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 1.0,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


# %% wrong: slowest over fastest
# mistake: That is the slowest over the fastest rank; asked is the slowest over the mean.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 * cp - 1,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": element_size * groups * flops / (heads * bandwidth),
    }


# %% wrong: two bytes an element
# mistake: An element has `element_size` bytes, not always 2.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * 2 * flops / (heads * bandwidth),
    }


# %% wrong: ulysses over ring
# mistake: That is Ulysses over the ring; asked is the ring over Ulysses.
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    return {
        "slowest_over_mean": 2 - 1 / cp,
        "ring_over_ulysses": (heads + groups) / (cp * groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }
