from labkit.answers import Edit, Same

_EVEN = "the load is even: as many whole rows, and as many copies, everywhere"

WRONG = [
    Edit("3 * h * f", "2 * h * f", mistake="A gated expert has three matrices: gate, up and down."),
    Edit(" + experts * h", "", mistake="The router is a matrix, too, [E, h], and every token passes all of it."),
    Edit("k * one + experts * h", "k * (one + h)", mistake="A token passes the whole router: it needs the logits of all experts."),
    Edit("dp // ep", "dp", mistake="Experts take their ranks from dp: dp/ep copies of each."),
    Edit("rows * ep / experts", "rows / experts", mistake="An expert gets rows from all ep ranks."),
    Edit("ep / k", "(ep - 1) / k", mistake="All-to-all keeps its own share: k T (P-1)/P rows. All-gather sends T (P-1)."),
    Edit("2 * one * rows", "one * rows", mistake="A multiply-add is two operations: 6 h f of them a row."),
    Edit("2 * rows * h", "rows * h", mistake="A row travels twice: there and back."),
    Edit("* (ep - 1) / ep /", "/", mistake="A row goes to *one* rank: of a rank's rows (P-1)/P travel, not P-1 copies of all."),
    Edit("dp // ep", "2"),
    Edit("dp // ep", "ep // 2"),
    Edit("rows * ep / experts", "rows * dp / experts"),
    Edit("rows * ep / experts", "rows"),
    Edit("ep / k", "ep / 2"),
    Edit("ep / k", "k / ep"),
    Edit("h * element_size *", "h * 2 *"),
    Edit("2 * one * rows", "2 * one * tokens"),
    Edit("2 * one * rows / flops / travel", "travel / (2 * one * rows / flops)"),
    Edit("k * one + experts * h", "k * one + k * h", mistake="A token passes the whole router: it needs the logits of all experts."),
    Edit("h * f, k * tokens", "h * f, 2 * tokens"),
]

RIGHT = [
    Edit(
        '"allgather_over_alltoall": ep / k',
        '"allgather_over_alltoall": 2 * (ep - 1) * tokens * h / (2 * k * tokens * h * (ep - 1) / ep)',
    ),
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
    return dict(parameters=experts * mlp + router, active_parameters=k * mlp + router, copies_of_an_expert=dp / ep, rows_of_an_expert=tokens * k / (experts / ep),
                allgather_over_alltoall=ep / k, compute_over_travel=compute / travel)


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


# %% right: products, without names between
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    return dict(
        parameters=experts * h * (1 + 3 * f), active_parameters=h * (experts + 3 * k * f), copies_of_an_expert=dp / ep,
        rows_of_an_expert=tokens * ep * k / experts,
        allgather_over_alltoall=((ep - 1) * tokens) / (k * tokens * (ep - 1) / ep),
        compute_over_travel=3 * f * bandwidth * ep / (flops * element_size * (ep - 1)),
    )


# %% wrong: one row a token
# mistake: A rank computes k rows for each token, and as many travel.
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    expert, router = 3 * h * f, experts * h
    seconds = 2 * expert * tokens / flops
    travel = 2 * k * tokens * h * element_size * (ep - 1) / ep / bandwidth
    return {
        "parameters": experts * expert + router, "active_parameters": k * expert + router,
        "copies_of_an_expert": dp // ep, "rows_of_an_expert": k * tokens * ep / experts,
        "allgather_over_alltoall": ep / k, "compute_over_travel": seconds / travel,
    }


# %% wrong: rows of a rank
# mistake: Those are the rows of all experts of a rank together.
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    expert, router = 3 * h * f, experts * h
    seconds = 2 * expert * k * tokens / flops
    travel = 2 * k * tokens * h * element_size * (ep - 1) / ep / bandwidth
    return {
        "parameters": experts * expert + router, "active_parameters": k * expert + router,
        "copies_of_an_expert": dp // ep, "rows_of_an_expert": k * tokens,
        "allgather_over_alltoall": ep / k, "compute_over_travel": seconds / travel,
    }


# %% wrong: rows of all copies
# mistake: Those are the rows of all copies of an expert. One copy gets those of its own ep group.
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    expert, router = 3 * h * f, experts * h
    seconds = 2 * expert * k * tokens / flops
    travel = 2 * k * tokens * h * element_size * (ep - 1) / ep / bandwidth
    return {
        "parameters": experts * expert + router, "active_parameters": k * expert + router,
        "copies_of_an_expert": dp // ep, "rows_of_an_expert": k * tokens * dp / experts,
        "allgather_over_alltoall": ep / k, "compute_over_travel": seconds / travel,
    }


# %% wrong: travel over compute
# mistake: That is travel over compute.
def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    expert, router = 3 * h * f, experts * h
    seconds = 2 * expert * k * tokens / flops
    travel = 2 * k * tokens * h * element_size * (ep - 1) / ep / bandwidth
    return {
        "parameters": experts * expert + router, "active_parameters": k * expert + router,
        "copies_of_an_expert": dp // ep, "rows_of_an_expert": k * tokens * ep / experts,
        "allgather_over_alltoall": ep / k, "compute_over_travel": travel / seconds,
    }
