from labkit.answers import Edit, Same

_EVEN = "the load is even: as many whole rows, and as many copies, everywhere"
_ROUTER = "A token passes the whole router: it needs the logits of all experts."

WRONG = [
    Edit("3 * h * f", "2 * h * f", mistake="A gated expert has three matrices: gate, up and down."),
    Edit(" + experts * h", "", mistake="The router is a matrix, too, [E, h], and every token passes all of it."),
    Edit("k * one + experts * h", "k * (one + h)", mistake=_ROUTER),
    Edit("k * one + experts * h", "k * one", mistake=_ROUTER),
    Edit("experts * one + experts * h", "experts / ep * one + experts * h",
         mistake="Those are the parameters of one rank. Asked are those of the whole layer, with all experts."),
    Edit("dp // ep", "dp", mistake="Experts take their ranks from dp: dp/ep copies of each."),
    Edit("rows * ep / experts", "rows / experts", mistake="An expert gets rows from all ep ranks."),
    Edit("rows * ep / experts", "rows * dp / experts",
         mistake="Those are the rows of all copies of an expert. One copy gets those of its own ep group."),
    Edit("rows * ep / experts", "rows", mistake="Those are the rows of all experts of a rank together."),
    Edit("ep / k", "(ep - 1) / k",
         mistake="All-to-all keeps its own share: k T (P-1)/P rows. All-gather sends T (P-1)."),
    Edit("h * element_size *", "h * 2 *", mistake="An element has `element_size` bytes, not always 2."),
    Edit("2 * one * rows", "one * rows", mistake="A multiply-add is two operations: 6 h f of them a row."),
    Edit("2 * rows * h", "rows * h", mistake="A row travels twice: there and back."),
    Edit("* (ep - 1) / ep /", "/",
         mistake="A row may be for an expert of its own rank: of a rank's rows (P-1)/P travel."),
    Edit("2 * one * rows / flops / travel", "travel / (2 * one * rows / flops)"),
    Edit("2 * one * rows", "2 * one * tokens"),
    Edit("dp // ep", "ep // 2"),
    Edit("ep / k", "ep / 2"),
    Edit("ep / k", "k / ep"),
    Edit("h * f, k * tokens", "h * f, 2 * tokens"),
]

RIGHT = [
    Edit("ep / k", "2 * (ep - 1) * tokens * h / (2 * k * tokens * h * (ep - 1) / ep)"),
    Edit("dp // ep", "float(dp) / ep", ("rows * ep / experts", "ep * tokens * k // experts")),
]

EQUIVALENT = [
    Same("line 7: `//` for `/` (2)", _EVEN),
    Same("line 11: `/` for `//`", _EVEN),
    Same("line 11: rounded up for down", _EVEN),
    Same("line 12: `//` for `/`", _EVEN),
]


# %% right: times of one row's computation and travel
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    mlp, router = 3 * h * f, h * experts
    compute = 6 * h * f / flops
    travel = 2 * h * element_size * (1 - 1 / ep) / bandwidth
    return dict(parameters=experts * mlp + router, active_parameters=k * mlp + router, copies_of_an_expert=dp / ep,
                rows_of_an_expert=tokens * k / (experts / ep), allgather_over_alltoall=ep / k,
                compute_over_travel=compute / travel)


# %% right: fractions
from fractions import Fraction

def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    router, expert = experts * h, h * f + h * f + f * h
    busy = 2 * Fraction(expert) * k * tokens / Fraction(flops)
    travel = Fraction(2 * k * tokens * h * element_size) * Fraction(ep - 1, ep) / Fraction(bandwidth)
    return {
        "compute_over_travel": float(busy / travel),
        "allgather_over_alltoall": float(Fraction(ep, k)),
        "rows_of_an_expert": float(Fraction(tokens * k * ep, experts)),
        "copies_of_an_expert": dp // ep,
        "active_parameters": router + k * expert,
        "parameters": router + experts * expert,
    }
