"""Lab 05, predictions: bytes of a layer, dropped tokens, seven questions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

# -------------------------------------------------------------------------------------------------- predictions


def bytes_per_layer(tokens: int, h: int, experts: int, k: int, ep: int, element_size: int) -> dict[str, float]:
    row = h * element_size
    return {
        "alltoall": (ep - 1) / ep * k * tokens * (2 * row + 4),
        "allgather": float((ep - 1) * tokens * (2 * row + 5 * experts)),
    }


def _layer(draw: Draw) -> dict[str, Any]:
    ep = draw.choice([2, 4, 8])
    return {
        "tokens": 64 * draw.integer(1, 64), "h": 128 * draw.integer(1, 16), "experts": ep * draw.integer(1, 8),
        "k": draw.integer(1, 4), "ep": ep, "element_size": draw.choice([2, 4]),
    }  # fmt: skip


_EXAMPLE = {"tokens": 4, "h": 3, "experts": 4, "k": 2, "ep": 2, "element_size": 4}
_EIGHT = {"tokens": 16, "h": 8, "experts": 8, "k": 2, "ep": 4, "element_size": 2}

_TINY_NUMBERS = {"tokens": 48, "h": 96, "experts": 24, "k": 3, "ep": 8, "element_size": 1}
_THREE_RANKS = {"tokens": 60, "h": 40, "experts": 6, "k": 5, "ep": 3, "element_size": 4}

_wrong_bytes = partial(instead, bytes_per_layer)


def _both(change: Callable[..., float]) -> Callable[..., dict[str, float]]:
    """Return a mistake of both numbers: `change` gets the right one, then the inputs."""
    return lambda **i: {way: change(right, **i) for way, right in bytes_per_layer(**i).items()}


def _weights_like_elements(ways: tuple[str, ...]) -> Callable[..., dict[str, float]]:
    wrong = {
        "alltoall": lambda **i: _of_all_to_all(**i, weight=i["element_size"]),
        "allgather": lambda **i: _of_all_gather(**i, routing=i["element_size"] + 1),
    }
    return _wrong_bytes(**{way: wrong[way] for way in ways})


def _of_all_to_all(tokens: int, h: int, k: int, ep: int, element_size: int, *, way: int = 2, weight: int = 4,
                   kept: bool = False, times_k: bool = True, **_: Any) -> float:  # fmt: skip
    share = 1.0 if kept else (ep - 1) / ep
    return share * (k if times_k else 1) * tokens * (way * h * element_size + weight)


def _of_all_gather(tokens: int, h: int, experts: int, ep: int, element_size: int, *, way: int = 2, routing: int = 5,
                   ranks: int = -1, **_: Any) -> float:  # fmt: skip
    return (ep + ranks) * tokens * (way * h * element_size + routing * experts)


BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        # One rank sends nothing: no row of its own, or a constant would have its points.
        Case(
            "the example: 4 tokens, 4 experts, 2 ranks; and one rank", _EXAMPLE, points=2, fixed=[{**_EIGHT, "ep": 1}]
        ),
        Case("other layers", _layer, points=2, hidden=True, fixed=[_EIGHT, _TINY_NUMBERS, _THREE_RANKS]),
    ],
    mistakes=[
        Mistake(
            _wrong_bytes(alltoall=lambda **i: _of_all_to_all(**i, way=1)),
            "All-to-all: what the experts make of the rows travels back, too.",
        ),
        Mistake(
            _wrong_bytes(alltoall=lambda **i: _of_all_to_all(**i, weight=0)),
            "All-to-all: each row takes its weight along, 4 bytes.",
        ),
        Mistake(
            _wrong_bytes(alltoall=lambda **i: _of_all_to_all(**i, weight=8)),
            "All-to-all: the weights go there; nobody needs them back.",
        ),
        Mistake(
            _wrong_bytes(alltoall=lambda **i: _of_all_to_all(**i, kept=True)),
            "All-to-all: of P rows one is for an expert of this very rank, and stays.",
        ),
        Mistake(
            _wrong_bytes(alltoall=lambda **i: _of_all_to_all(**i, kept=True) * (i["experts"] - 1) / i["experts"]),
            "All-to-all: what stays goes to this *rank*, which holds E/P experts and not one.",
        ),
        Mistake(
            _wrong_bytes(alltoall=lambda **i: _of_all_to_all(**i, times_k=False)),
            "All-to-all: a token is a row for each of its k experts.",
        ),
        Mistake(
            _wrong_bytes(allgather=lambda **i: _of_all_gather(**i, way=1)),
            "All-gather: the partial sums come back by a reduce-scatter, as many bytes as the tokens themselves.",
        ),
        Mistake(
            _wrong_bytes(allgather=lambda **i: _of_all_gather(**i, ranks=0)),
            "All-gather: a rank sends its tokens to the P-1 *others*.",
        ),
        *(
            Mistake(
                _wrong_bytes(
                    allgather=lambda tokens, ep, way=way, **i: (
                        _of_all_gather(tokens=tokens, ep=2, **{**i, "way": 1})
                        + way(ep) * tokens * i["h"] * i["element_size"]
                    )
                ),
                "All-gather: each of the P-1 other ranks gets a message of its own. Each of them counts.",
            )
            for way in (lambda ep: ep - 1, lambda ep: 1)
        ),
        Mistake(
            _wrong_bytes(allgather=lambda **i: _of_all_gather(**i, routing=10)),
            "All-gather: weights and flags go there. What comes back is [P T, h] alone.",
        ),
        *(
            Mistake(_weights_like_elements(ways), "A weight has 4 bytes, whatever the size of an element of a row.")
            for ways in (("alltoall",), ("allgather",), ("alltoall", "allgather"))
        ),
        Mistake(
            _wrong_bytes(
                alltoall=lambda **i: _of_all_to_all(**{**i, "element_size": 1}, weight=1),
                allgather=lambda **i: _of_all_gather(**{**i, "element_size": 1}, routing=2),
            ),
            "Those are numbers, not bytes.",
        ),
        Mistake(
            _both(lambda right, ep, **_: right / ep), "T is the number of tokens of *one* rank: it is not divided by P."
        ),
        Mistake(_both(lambda right, ep, **_: right * ep), "That is what all P ranks send together."),
        Mistake(
            _both(lambda right, **_: 2 * right),
            "Asked is the forward pass alone. The way back brings results, and no gradients.",
        ),
        Mistake(
            _wrong_bytes(allgather=lambda **i: _of_all_gather(**i, routing=0)),
            "All-gather: with each token go E weights of 4 bytes and E flags of one.",
        ),
        Mistake(
            _wrong_bytes(allgather=lambda **i: _of_all_gather(**i, routing=4)),
            "All-gather: beside the E weights each token takes E flags of one byte along.",
        ),
        Mistake(
            _wrong_bytes(allgather=lambda **i: _of_all_gather(**{**i, "experts": i["k"]})),
            "All-gather: a token goes to all ranks with all of its E weights of 4 bytes and E flags, not with k.",
        ),
        Mistake(
            _wrong_bytes(
                allgather=lambda tokens, h, experts, ep, element_size, **_: (
                    (ep - 1) * tokens * (h * element_size * (1 + ep) + 5 * experts)
                )
            ),
            "All-gather: of the reduce-scatter's [P T, h] a rank keeps T rows, and sends P-1 times that.",
        ),
    ],
    idea="For each way: how many rows or tokens leave this rank, and what does each of them weigh, there and back?",
    hint="All-to-all: k*T rows, of which (P-1)/P leave: h elements and 4 bytes there, h elements back. All-gather: "
    "P-1 times T tokens with 5*E bytes of routing, and P-1 times T rows of partial sums.",
)


def _chance(n: int, tokens: int, p: float) -> float:
    """The probability of n successes in `tokens` trials."""
    return math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n)


def expected_drops(tokens: int, experts: int, k: int, factor: float) -> dict[str, Any]:
    mean = tokens * k / experts
    capacity = math.ceil(mean * factor)
    over = math.fsum((n - capacity) * _chance(n, tokens, k / experts) for n in range(capacity + 1, tokens + 1))
    return {"capacity": capacity, "dropped": over / mean}


def _drops(draw: Draw) -> dict[str, Any]:
    """Draw few tokens and little room, so that the right answer is not close to zero."""
    return {"tokens": 8 * draw.integer(2, 8), "experts": draw.choice([8, 16]), "k": draw.integer(2, 3),
            "factor": draw.choice([1.0, 1.25])}  # fmt: skip


def _fraction(draw: Draw) -> dict[str, Any]:
    return {"tokens": 8 * draw.integer(2, 20) + draw.integer(1, 3), "experts": 8, "k": 1, "factor": 1.25}


_wrong_drops = partial(instead, expected_drops)


def _mean(of: Callable[..., float]) -> Callable[..., float]:
    """Return the mean of `of(n, capacity)` over n, times E, over k T."""

    def dropped(tokens: int, experts: int, k: int, factor: float) -> float:
        capacity, p = math.ceil(tokens * k / experts * factor), k / experts
        return math.fsum(of(n, capacity) * _chance(n, tokens, p) for n in range(tokens + 1)) / (tokens * p)

    return dropped


def _with_repeats(tokens: int, experts: int, k: int, factor: float) -> float:
    """A mistake: k T independent choices, so that a token may choose an expert twice."""
    return expected_drops(tokens * k, experts, 1, factor)["dropped"]


def _where_full(tokens: int, experts: int, k: int, factor: float) -> float:
    """A mistake: the mean over only those experts that drop a token."""
    over, full = (_mean(of)(tokens, experts, k, factor) for of in (lambda n, c: max(0, n - c), lambda n, c: n > c))
    return over / full * experts / (k * tokens) if full else 0.0


def _unrounded(tokens: int, experts: int, k: int, factor: float) -> float:
    room = tokens * k / experts * factor
    return _mean(lambda n, _: max(0.0, n - room))(tokens, experts, k, factor)


def _room_without_k(tokens: int, experts: int, k: int, factor: float) -> dict[str, Any]:
    room = math.ceil(tokens / experts * factor)
    return {"capacity": room, "dropped": _mean(lambda n, _: max(0, n - room))(tokens, experts, k, factor)}


def _floor(tokens: int, experts: int, k: int, factor: float) -> dict[str, Any]:
    capacity = math.floor(tokens * k / experts * factor)
    over = math.fsum((n - capacity) * _chance(n, tokens, k / experts) for n in range(capacity + 1, tokens + 1))
    return {"capacity": capacity, "dropped": over * experts / (tokens * k)}


def _one_choice(tokens: int, experts: int, k: int, factor: float) -> dict[str, Any]:
    capacity, mean = expected_drops(tokens, experts, k, factor)["capacity"], tokens * k / experts
    over = math.fsum((n - capacity) * _chance(n, tokens, 1 / experts) for n in range(capacity + 1, tokens + 1))
    return {"capacity": capacity, "dropped": over / mean}


DROPS = Exercise(
    "expected_drops",
    reference=expected_drops,
    rtol=1e-3,
    atol=1e-12,  # nothing is dropped: as far as a sum of floats is nothing
    cases=[
        Case("2 tokens, 2 experts, one each", {"tokens": 2, "experts": 2, "k": 1, "factor": 1.0}),
        Case("2 tokens, two of 3 experts each, factor 1/2", {"tokens": 2, "experts": 3, "k": 2, "factor": 0.5}),
        Case("other layers", _drops, hidden=True, fixed=[
            {"tokens": 40, "experts": 8, "k": 4, "factor": 0.5},
            {"tokens": 40, "experts": 16, "k": 1, "factor": 0.75},
            {"tokens": 8, "experts": 4, "k": 3, "factor": 1.5}]),  # room for 9 of 8 tokens
        Case("a capacity that is no whole number", _fraction, hidden=True, fixed=[
            {"tokens": n, "experts": 8, "k": 1, "factor": 1.25} for n in (26, 38)]),  # 4.06 and 5.94
    ],
    mistakes=[
        Mistake(_wrong_drops(dropped=lambda **i: max(0.0, 1 - i["factor"])), "That is what an exactly even load would "
                "drop. Chance is never even: n is binomial, and an expert drops n - C where n is larger."),
        Mistake(_wrong_drops(dropped=lambda **i: expected_drops(**i)["dropped"] / i["experts"]), "That is one "
                "expert's share. All E of them drop."),
        Mistake(_wrong_drops(dropped=lambda **i: expected_drops(**i)["dropped"] * i["k"]), "The share is of the k*T "
                "rows, not of the T tokens."),
        Mistake(_wrong_drops(dropped=lambda **i: _mean(lambda n, c: n > c)(**i) * i["tokens"] * i["k"] / i["experts"]),
                "That is the chance that an expert drops anything. Asked is how many rows: n - C where n is larger."),
        Mistake(_wrong_drops(dropped=lambda **i: _mean(lambda n, c: max(0, n - c) / max(1, n))(**i) * i["tokens"]
                * i["k"] / i["experts"]), "That is a mean of quotients. A busy expert has more rows than others: take "
                "the mean number of dropped rows, and divide by all rows afterwards."),
        Mistake(_wrong_drops(dropped=_mean(lambda n, c: max(0, c - n))), "Those are the places that stay empty."),
        Mistake(_wrong_drops(dropped=_with_repeats), "Those are k T free choices. A token's k experts are different, "
                "so it chooses an expert once at most: T trials, each with probability k/E."),
        Mistake(_wrong_drops(dropped=_where_full), "That is the mean over experts that drop anything. Those that drop "
                "nothing count, too."),
        Mistake(_wrong_drops(dropped=_unrounded), "The rows are counted over a capacity that is not rounded up."),
        Mistake(_wrong_drops(dropped=lambda **i: 100 * expected_drops(**i)["dropped"]), "Asked is a share, not a "
                "percentage."),
        Mistake(_wrong_drops(dropped=lambda **i: i["k"] * i["tokens"] * expected_drops(**i)["dropped"]), "That is how "
                "many rows are dropped. Asked is their share of the k T rows."),
        Mistake(_room_without_k, "The capacity counts rows: there are k of them for each token."),
        Mistake(_one_choice, "A token chooses k of E experts: the chance that this expert is one of them is k/E."),
        Mistake(_floor, "The capacity is rounded up."),
    ],
    idea="An expert drops n - C rows where n is larger than C, and none where it is not: what is the mean over n?",
    hint="C = ceil(k T / E * factor). n ~ Binomial(T, k/E). dropped = E * sum over n > C of (n - C) P(n), over k T.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- 7 questions


def answers(
    tokens: int, h: int, f: int, experts: int, k: int, ep: int, dp: int, element_size: int, flops: float,
    bandwidth: float,
) -> dict[str, Any]:  # fmt: skip
    one = 3 * h * f
    return {
        "parameters": experts * one + experts * h,
        "active_parameters": k * one + experts * h,
        "copies_of_an_expert": dp // ep,
        "rows_of_an_expert": tokens * ep * k / experts,
        "allgather_over_alltoall": ep / k,
        "compute_over_travel": 3 * f * bandwidth * ep / (element_size * (ep - 1) * flops),
    }


def _machine(draw: Draw) -> dict[str, Any]:
    ep = draw.choice([2, 4, 8])
    experts = ep * draw.choice([1, 2, 4, 8])
    return {
        "tokens": 256 * experts * draw.integer(1, 4), "h": 512 * draw.integer(1, 14), "f": 256 * draw.integer(2, 40),
        "experts": experts, "k": draw.integer(1, 2), "ep": ep, "dp": ep * draw.choice([1, 2, 4]),
        "element_size": draw.choice([1, 2]), "flops": 1e14 * draw.integer(1, 9),
        "bandwidth": 1e10 * draw.integer(2, 40),
    }  # fmt: skip


_TINY = {
    "tokens": 8, "h": 2, "f": 3, "experts": 8, "k": 3, "ep": 4, "dp": 12, "element_size": 2, "flops": 144.0,
    "bandwidth": 96.0,
}  # fmt: skip

_MIXTRAL = {
    "tokens": 4096, "h": 4096, "f": 14336, "experts": 8, "k": 2, "ep": 4, "dp": 8, "element_size": 2, "flops": 4e14,
    "bandwidth": 5e10,
}  # fmt: skip

_FINE_GRAINED = {
    "tokens": 3840, "h": 1536, "f": 512, "experts": 48, "k": 6, "ep": 16, "dp": 48, "element_size": 1, "flops": 9e14,
    "bandwidth": 4e11,
}  # fmt: skip

_wrong_answers = partial(instead, answers)

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    rtol=1e-3,
    cases=[
        Case("8 tokens, three of 8 experts of 2 x 3, ep 4, dp 12", _TINY),
        Case("a layer of Mixtral 8x7B, another model, another machine", _machine, points=3, hidden=True, fixed=[
            _MIXTRAL, _FINE_GRAINED]),
    ],
    mistakes=[
        Mistake(_wrong_answers(
            parameters=lambda h, f, experts, **_: experts * (2 * h * f + h),
            active_parameters=lambda h, f, k, experts, **_: k * 2 * h * f + experts * h,
            compute_over_travel=lambda f, element_size, ep, flops, bandwidth, **_: 2 * f * bandwidth * ep
            / (element_size * (ep - 1) * flops),
        ), "A gated expert has three matrices: gate, up and down."),
        Mistake(_wrong_answers(
            parameters=lambda h, f, experts, **_: 3 * h * f * experts,
            active_parameters=lambda h, f, k, **_: 3 * h * f * k,
        ), "The router is a matrix, too, [E, h], and every token passes all of it."),
        Mistake(_wrong_answers(active_parameters=lambda h, f, k, **_: k * (3 * h * f + h)), "A token passes the whole "
                "router: it needs the logits of all experts."),
        Mistake(_wrong_answers(active_parameters=lambda h, f, k, **_: k * 3 * h * f), "A token passes the router, "
                "too."),
        Mistake(_wrong_answers(copies_of_an_expert=lambda dp, **_: dp), "Experts take their ranks from dp: dp/ep "
                "copies of each."),
        Mistake(_wrong_answers(copies_of_an_expert=lambda ep, **_: ep), "That is how many ranks share the experts. "
                "Each such group of ranks holds every expert once."),
        Mistake(_wrong_answers(copies_of_an_expert=lambda **_: 1), "That is the number within one ep group, and the "
                "job has several."),
        Mistake(_wrong_answers(rows_of_an_expert=lambda tokens, k, experts, **_: tokens * k / experts), "An expert "
                "gets rows from all ep ranks."),
        Mistake(_wrong_answers(rows_of_an_expert=lambda tokens, k, dp, experts, **_: tokens * k * dp / experts),
                "Those are the rows of all copies of an expert. One copy gets those of its own ep group."),
        Mistake(_wrong_answers(rows_of_an_expert=lambda tokens, k, **_: tokens * k), "Those are the rows of all "
                "experts of a rank together."),
        *(Mistake(_wrong_answers(parameters=of), "Asked are the parameters of the whole layer, not those on one rank.")
          for of in (lambda h, f, experts, ep, **_: 3 * h * f * experts / ep + experts * h,
                     lambda h, f, experts, ep, **_: (3 * h * f + h) * experts / ep)),
        Mistake(_wrong_answers(allgather_over_alltoall=lambda ep, k, **_: k / ep), "That is all-to-all over "
                "all-gather."),
        Mistake(_wrong_answers(compute_over_travel=lambda **i: 1 / answers(**i)["compute_over_travel"]), "That is "
                "travel over compute."),
        Mistake(_wrong_answers(compute_over_travel=lambda **i: 3 * answers(**i)["compute_over_travel"]), "Asked is the "
                "forward pass alone, for computing and for travel."),
        Mistake(_wrong_answers(compute_over_travel=lambda **i: answers(**i)["compute_over_travel"] / i["ep"]), "A row "
                "goes to *one* rank: of a rank's rows (P-1)/P travel, not P-1 copies of all."),
        Mistake(_wrong_answers(compute_over_travel=lambda **i: answers(**i)["compute_over_travel"] / i["k"]), "A rank "
                "computes k rows for each token, and as many travel."),
        Mistake(_wrong_answers(allgather_over_alltoall=lambda ep, k, **_: (ep - 1) / k), "All-to-all keeps its own "
                "share: k T (P-1)/P rows. All-gather sends T (P-1)."),
        Mistake(_wrong_answers(
            compute_over_travel=lambda f, element_size, ep, flops, bandwidth, **_: 1.5 * f * bandwidth * ep
            / (element_size * (ep - 1) * flops)
        ), "A multiply-add is two operations: 6 h f of them a row."),
        Mistake(_wrong_answers(
            compute_over_travel=lambda f, element_size, ep, flops, bandwidth, **_: 6 * f * bandwidth * ep
            / (element_size * (ep - 1) * flops)
        ), "A row travels twice: there and back."),
        Mistake(_wrong_answers(
            compute_over_travel=lambda f, element_size, flops, bandwidth, **_: 3 * f * bandwidth
            / (element_size * flops)
        ), "Of a rank's rows (P-1)/P travel, and all are computed."),
    ],
    idea="Start from one row: what does it cost to compute, and what to send there and back?",
    hint="An expert: 3 h f parameters; the router: E h. edp = dp/ep. Rows: T k from each of ep ranks, over E experts. "
    "A row: 6 h f operations; 2 h element_size bytes, of which (P-1)/P travel.",
)  # fmt: skip
