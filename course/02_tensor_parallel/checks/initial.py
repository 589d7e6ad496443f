"""Lab 02, initial values: each rank's part of a matrix that one process would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise, Mistake


def initial_part(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank].contiguous()


def _local_draw(by_rank: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    def answer(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
        local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
        own = seed if dim is None else by_rank(seed, tp_rank)
        return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std

    return answer


def _next_numbers(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    """A mistaken part: the numbers of the serial matrix are dealt to the ranks in the order in which they are drawn."""
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    numbers = initial_part(shape, None, 0, 1, seed, std).flatten()
    return numbers.unflatten(0, (-1, *local))[0 if dim is None else tp_rank]


def _cut_otherwise(part: Callable[[torch.Tensor, int, int, int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a mistaken answer: of the serial matrix a rank keeps `part(whole, dim, rank, size)`; a replicated matrix
    is right."""

    def answer(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
        whole = initial_part(shape, None, 0, 1, seed, std)
        return whole if dim is None else part(whole, dim, tp_rank, tp_size)

    return answer


def _zeros_elsewhere(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    own = torch.arange(whole.shape[dim]) * size // whole.shape[dim] == rank
    return whole * (own[:, None] if dim == 0 else own)


def _in_turn(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    """A mistaken part: one generator, from which each rank draws its local shape after those of the ranks before it."""
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*local, generator=generator) for _ in range(tp_size)][0 if dim is None else tp_rank] * std


def _dealt(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return whole.unflatten(dim, (-1, size)).select(dim + 1, rank)


def _a_matrix(dim: int | None) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        t = draw.choice([2, 4])
        shape = [t * draw.integer(1, 6), t * draw.integer(1, 6)]
        return {
            "shape": shape, "dim": dim, "tp_rank": draw.integer(1, t - 1), "tp_size": t,
            "seed": draw.integer(0, 10**6), "std": draw.integer(1, 9) / 100,
        }  # fmt: skip

    return inputs


def _first_rank(dim: int, tp_size: int = 3) -> dict[str, Any]:
    return {"shape": [6, 9], "dim": dim, "tp_rank": 0, "tp_size": tp_size, "seed": 5, "std": 0.5}


INITIAL = Exercise(
    "initial_part",
    reference=initial_part,
    cases=[
        Case("a matrix [4, 2] cut along dim 0, rank 1 of 2: its rows 2 and 3",
             {"shape": [4, 2], "dim": 0, "tp_rank": 1, "tp_size": 2, "seed": 1, "std": 0.02}),
        Case("cut along dim 0", _a_matrix(0), hidden=True, fixed=[_first_rank(0), _first_rank(0, 1)]),
        Case("cut along dim 1", _a_matrix(1), hidden=True, fixed=[_first_rank(1), _first_rank(1, 1)]),
        Case("replicated", _a_matrix(None), hidden=True),
    ],
    mistakes=[
        Mistake(
            _local_draw(lambda seed, rank: seed),
            "Every rank draws the same numbers, as in the careless version: all shards are equal.",
        ),
        Mistake(
            _local_draw(lambda seed, rank: seed + rank),
            "The shards differ now, but they are no parts of the serial matrix: the model changes with tp.",
        ),
        Mistake(
            lambda std, **given: initial_part(std=1.0, **given),
            "The numbers are not multiplied by std.",
        ),
        *(
            Mistake(
                lambda std, tp_size, dim, always=always, **given: initial_part(
                    std=std * tp_size ** (-0.5 if always or dim is not None else 0), tp_size=tp_size, dim=dim, **given),
                "You changed std: a part has the numbers of the serial matrix as they are, on any number of ranks.",
            )
            for always in (True, False)
        ),  # fmt: skip
        Mistake(
            lambda dim, **given: initial_part(dim=0 if dim is None else dim, **given),
            "A replicated matrix is cut: with dim None every rank holds all of it.",
        ),
        Mistake(
            lambda dim, **given: initial_part(dim=dim or None, **given),
            "A matrix that is cut along dim 0 is not cut here: 0 and None are different things.",
        ),
        Mistake(
            lambda dim, **given: initial_part(dim=None, **given),
            "This is the whole matrix on every rank: of one that is cut, a rank holds a part.",
        ),
        Mistake(
            lambda dim, **given: initial_part(dim=None if dim is None else 0, **given),
            "The matrix is cut along dim 0, whatever dim says.",
        ),
        Mistake(
            _cut_otherwise(lambda whole, dim, rank, size: whole.chunk(size, 1 - dim)[rank]),
            "The matrix is cut along the other dim: dim 0 are the rows.",
        ),
        Mistake(
            _cut_otherwise(_zeros_elsewhere),
            "The rank's part stands in a whole matrix of zeros: return the part alone.",
        ),
        Mistake(
            _in_turn,
            "Each rank draws its part where the one before it stopped: in the serial matrix the numbers stand row by "
            "row.",
        ),
        Mistake(
            _cut_otherwise(_dealt),
            "Rows or columns are dealt out to the ranks one by one: a rank holds a block of consecutive ones.",
        ),
        Mistake(
            lambda seed, tp_rank, dim, **given: initial_part(
                seed=seed + (tp_rank if dim is None else 0), tp_rank=tp_rank, dim=dim, **given),
            "A replicated matrix is another on each rank: its copies must be equal.",
        ),  # fmt: skip
        Mistake(
            lambda seed, tp_rank, **given: initial_part(seed=seed + tp_rank, tp_rank=tp_rank, **given),
            "Each rank draws another whole matrix: its part is no part of the serial one.",
        ),
        Mistake(
            _next_numbers,
            "Each rank continues where the one before it stopped: that is right along dim 0 only.",
        ),
    ],
    idea="What does one process draw, and which block of it does this rank hold?",
    hint="Draw the whole matrix from the seed on every rank, times std, and keep this rank's block along dim.",
)  # fmt: skip
