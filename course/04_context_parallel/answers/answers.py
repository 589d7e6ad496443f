from labkit.answers import Edit, Same

_SLOWEST = "(2 * cp - 1) / cp"
_RATIO = "cp * groups / (heads + groups)"
_HIDE = "groups * element_size * flops / (heads * bandwidth)"

WRONG = [
    Edit(_SLOWEST, "1.0", mistake="That is zigzag; asked is the contiguous cut."),
    Edit(_SLOWEST, "2 * cp - 1",
         mistake="That is the slowest over the fastest rank; asked is the slowest over the mean."),
    Edit(_RATIO, "(heads + groups) / (cp * groups)",
         mistake="That is Ulysses over the ring; asked is the ring over Ulysses."),
    Edit(_RATIO, "2 * cp * groups / (heads + 2 * groups)",
         mistake="In Ulysses the output is exchanged, too: 2 heads + 2 groups."),
    Edit(_RATIO, "(cp - 1) * groups / (heads + groups)",
         mistake="In an all-to-all a rank keeps its own share: (C-1)/C leaves, as in `bytes_per_layer`."),
    Edit("groups // tp", "heads // tp",
         mistake="Keys and values have fewer heads than queries; without copies the *groups* of "
         "a tp rank are what can be divided."),
    Edit("groups // tp", "groups",
         mistake="tp has already divided the groups: Ulysses can only divide the part that a tp rank has."),
    Edit("2 * cp * tp", "2 * cp", mistake="Sequence parallelism cuts each of the 2C chunks again, over tp."),
    Edit(_HIDE, _HIDE.replace("element_size", "2"), mistake="An element has `element_size` bytes, not always 2."),
    Edit(_HIDE, f"{_HIDE} / 2",
         mistake="That is half of it: at a step half of a block's pairs are visible, and both K and V travel."),
    Edit(_HIDE, f"2 * {_HIDE}",
         mistake="A step computes twice as much as you count: two products, and two operations for a multiply-add."),
    Edit(_HIDE, "element_size * flops / bandwidth",
         mistake="Keys and values have `groups` heads, the work has `heads`."),
    Edit(_HIDE, f"int({_HIDE})", mistake="tokens_to_hide is asked for not rounded."),
    Edit(_HIDE, "-(-groups * element_size * flops // (heads * bandwidth))",
         mistake="tokens_to_hide is asked for not rounded."),
    Edit(_HIDE, f"round({_HIDE})", mistake="tokens_to_hide is asked for not rounded."),
    Edit(_HIDE, f"cp * {_HIDE}", mistake="Those are the tokens of the whole sequence; asked are those of one rank."),
    Edit(_HIDE, f"tp * {_HIDE}",
         mistake="tp divides the heads and the groups alike: neither changes how work and bytes compare."),
    Edit(_HIDE, f"{_HIDE} / tp",
         mistake="tp divides the heads and the groups alike: neither changes how work and bytes compare."),
    Edit("groups // tp", "min(cp, groups // tp)"),
    Edit(_RATIO, "cp / 2"),
    Edit(_RATIO, "cp"),
    Edit(_SLOWEST, "cp"),
]

RIGHT = [
    Edit(_SLOWEST, "2 - 1 / cp"),
    # to within a token
    Edit(_SLOWEST, "cp * (s * (s // cp) - (s // cp) ** 2 / 2) / (s * s / 2)"),
]

EQUIVALENT = [Same(f"line 8: {one}", "tp divides groups") for one in ("`/` for `//`", "rounded up for down")]


# %% right: counted from tokens and bytes
def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):
    n = s / cp
    last = sum(range(s - s // cp + 1, s + 1))
    ring, ulysses = 2 * (cp - 1) * n * groups, (cp - 1) / cp * n * 2 * (heads + groups)
    return dict(
        slowest_over_mean=last / (s * (s + 1) / 2 / cp), ring_over_ulysses=ring / ulysses, largest_ulysses=groups / tp,
        sequence_multiple=2.0 * cp * tp, tokens_to_hide=flops / bandwidth * element_size * groups / heads,
    )


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
