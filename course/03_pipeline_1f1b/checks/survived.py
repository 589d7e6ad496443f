"""Lab 03, which microbatches are in a sum: the answer, and the answers of programs that search for it in another way.

In the three vectors of the text many wrong searches find the right answer by chance. So a search is recognised among
matrices only, which the hidden cases have; a wrong form of the answer is recognised everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch

from labkit.exercises import Mistake

Grads = list[torch.Tensor]
Found = Callable[[torch.Tensor, Grads], Any]  # (got, grads) -> an answer


def survivors(got: torch.Tensor, grads: Grads) -> list[int]:
    """The indices i with got = sum of grads[i]."""
    columns = torch.stack([g.flatten().double() for g in grads], dim=1)
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights.tolist()) if w > 0.5]


# ------------------------------------------------------------------------------------------ ways of searching


def _always(value: Callable[[int], Any]) -> Found:
    return lambda got, grads: value(len(grads))


def _lost(got: torch.Tensor, grads: Grads) -> list[int]:
    return [i for i in range(len(grads)) if i not in survivors(got, grads)]


def _each_alone(chosen: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Found:
    """A search that compares each gradient with the sum, without the others."""
    return lambda got, grads: [i for i, g in enumerate(grads) if chosen(g.flatten().double(), got.flatten().double())]


def _choices(n: int, most: int = 0) -> Iterable[Sequence[int]]:
    """All sets of one index or more of n, the small sets first."""
    return chain.from_iterable(combinations(range(n), k) for k in range(1, (most or n) + 1))


def _runs(n: int) -> Iterable[Sequence[int]]:
    """All sets of consecutive indices."""
    return (range(a, b) for a in range(n) for b in range(a + 1, n + 1))


def _apart(got: torch.Tensor, total: torch.Tensor, count: int) -> torch.Tensor:
    return (got - total).norm()


def _smallest(
    error: Callable[..., torch.Tensor] = _apart, choices: Callable[[int], Iterable[Sequence[int]]] = _choices
) -> Found:
    """A search for the set with the smallest error(got, sum of its gradients, their number)."""

    def found(got: torch.Tensor, grads: Grads) -> list[int]:
        whole, each = got.double(), torch.stack([g.double() for g in grads])

        def wrong(chosen: Sequence[int]) -> float:
            return float(error(whole, each[list(chosen)].sum(0), len(chosen)))

        best: Sequence[int] = min(choices(len(grads)), key=wrong)
        return list(best)

    return found


def _neighbours(otherwise: Any) -> Found:
    """A search that tries sets of consecutive gradients only."""

    def found(got: torch.Tensor, grads: Grads) -> Any:
        right = survivors(got, grads)
        return right if right and right[-1] - right[0] == len(right) - 1 else otherwise

    return found


_NONE_FOUND: list[Any] = [[], None]  # what a search gives that finds nothing
Near = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (rests [subsets, numbers], got [numbers]) -> [subsets]


def _first_near(near: Near, otherwise: Any) -> Found:
    """A search for the first set whose sum is near `got`, the small sets first; `otherwise` where none is."""

    def found(got: torch.Tensor, grads: Grads) -> Any:
        choices = list(_choices(len(grads)))
        flat = torch.stack([g.flatten() for g in grads])
        chosen = torch.tensor([[float(i in one) for i in range(len(grads))] for one in choices])
        near_ = near(chosen.double() @ flat.double() - got.flatten().double(), got.flatten().double())
        return list(choices[int(near_.int().argmax())]) if bool(near_.any()) else otherwise

    return found


def _within(size: Callable[[torch.Tensor], torch.Tensor], most: float) -> Near:
    """A tolerance that does not depend on how large the gradients are."""
    return lambda rests, got: size(rests) < most


def _within_a_part(part: float) -> Near:
    return lambda rests, got: rests.norm(dim=1) < part * got.norm()


def _any_entry(most: float) -> Near:
    return lambda rests, got: (rests.abs() <= most + 1e-5 * got.abs()).any(1)


def _entry(at: int) -> Near:
    return lambda rests, got: rests[:, at].abs() <= 1e-4 * got.abs().max()


_SIZES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda rests: rests.abs().amax(1), lambda rests: rests.abs().mean(1), lambda rests: rests.norm(dim=1),
]  # fmt: skip


def _without_the_worst(got: torch.Tensor, grads: Grads) -> list[int]:
    """A search that begins with all, and leaves out one after the other while the difference becomes smaller."""
    kept = list(range(len(grads)))

    def apart(chosen: Sequence[int]) -> float:
        return float((sum((grads[i].double() for i in chosen), -got.double())).norm())

    while len(kept) > 1:
        best = min(kept, key=lambda i: apart([j for j in kept if j != i]))
        if apart([j for j in kept if j != best]) >= apart(kept):
            break
        kept.remove(best)
    return kept


def _nearest_alone(got: torch.Tensor, grads: Grads) -> list[int]:
    return [min(range(len(grads)), key=lambda i: float((got - grads[i]).norm()))]


def _nearest_first(got: torch.Tensor, grads: Grads) -> list[int]:
    """A search that adds the gradient that leaves the smallest difference, while the difference becomes smaller."""
    rest, left = got, list(range(len(grads)))
    while left:
        best = min(left, key=lambda i: float((rest - grads[i]).norm()))
        if (rest - grads[best]).norm() >= rest.norm():
            break
        rest = rest - grads[best]
        left.remove(best)
    return [i for i in range(len(grads)) if i not in left]


_NONE = (
    "It finds none, though several are in the sum. A sum of several equals no single gradient, and it is right only up "
    "to rounding: compare with a tolerance, or round the weights."
)
_ALONE = (
    "This compares each gradient with the sum by itself. The gradients are like each other, so one that is lost "
    "resembles the sum, too: decide on all together."
)
_ABSOLUTE = (
    "Your tolerance is a fixed number. It is too wide where the gradients are tiny, and too narrow where they are "
    "large: compare what is left with the size of the gradients."
)
_WIDE = "Your tolerance is too wide: a choice that is only near the sum is taken for it. Rounding errors are tiny."
_SEARCHES: list[tuple[Found, str]] = [
    (
        _without_the_worst,
        "This begins with all and leaves out one after the other while that helps. What helps most alone need not "
        "be what is lost: decide on all together.",
    ),
    (
        _nearest_first,
        "This takes the nearest gradient, then the nearest to the rest, and keeps what it has taken. The nearest "
        "need not be in the sum: decide on all together.",
    ),
    *(
        (search, "It finds only microbatches that follow each other.")
        for search in (_neighbours([]), _neighbours(None), _smallest(choices=_runs))
    ),
    (_always(lambda n: []), _NONE),
    (_always(lambda n: None), _NONE),
    (
        _always(lambda n: list(range(n))),
        "This finds all, but some did not survive. A weight of 1e-8 is a 0 with a rounding error; and a gradient "
        "that brings the sum nearer need not be in it.",
    ),
    (_always(lambda n: [n - 1]), "It finds the last one alone; that is not always the answer."),
    (_lost, "These are the microbatches that are *not* in the sum."),
    (_each_alone(lambda g, got: g @ got > 0.5 * (g @ g)), _ALONE),
    (_each_alone(lambda g, got: torch.cosine_similarity(g, got, dim=0) > 0.5), _ALONE),
    *(
        (
            _smallest(choices=partial(_choices, most=most)),
            f"It tries no more than {most} microbatches together; any number may be left.",
        )
        for most in (2, 3)
    ),
    (
        _smallest(lambda got, total, count: (got - total / count).norm()),
        "This compares with the *mean* of the chosen gradients; got is their sum.",
    ),
    (
        lambda got, grads: [i for i, g in enumerate(grads) if (g * got).sum() > 0],
        "A positive product is no proof: gradients are not orthogonal, so one that is in the sum can have a "
        "negative product with it, and one that is not a positive product.",
    ),
    (_nearest_alone, "This finds the one gradient that is nearest to the sum; any number may be in it."),
    *(
        (_first_near(_within(size, most), otherwise), _ABSOLUTE)
        for size in _SIZES
        for most in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, 1e-4, 1e-5, 1e-6)
        for otherwise in _NONE_FOUND
    ),
    *((_first_near(_within_a_part(part), []), _WIDE) for part in (0.5, 0.4, 0.3, 0.25, 0.2, 0.1)),
    *(
        (
            _first_near(_any_entry(most), otherwise),
            "One entry that agrees is no proof: *all* entries must agree, up to rounding.",
        )
        for most in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
        for otherwise in _NONE_FOUND
    ),
    *(
        (
            _first_near(_entry(at), otherwise),
            "This compares one entry of the tensors; others may differ.",
        )
        for at in (0, -1)
        for otherwise in _NONE_FOUND
    ),
]


def _among_matrices(found: Found) -> Found:
    return lambda got, grads: found(got, grads) if got.dim() > 1 else NotImplemented


MISTAKES = [
    *(Mistake(_among_matrices(found), hint) for found, hint in _SEARCHES),
    Mistake(lambda got, grads: [i + 1 for i in survivors(got, grads)], "The indices count from 1 here, not from 0."),
    Mistake(lambda got, grads: survivors(got, grads)[::-1], "These are the right ones, but not in order."),
    Mistake(
        lambda got, grads: [i in survivors(got, grads) for i in range(len(grads))],
        "This says of each microbatch whether it is in the sum; asked are the indices of those that are.",
    ),
]
