"""Coefficients of the polynomials that bring singular values near 1 (`optim/muon`), by the name of their set.

| set             | rounds           | from                                                                |
|-----------------|------------------|---------------------------------------------------------------------|
| `quintic`       | multiples of 5   | each round its own polynomial (leloykun.github.io, Muon coefficients)|
| `simple`        | any              | Jordan 2024: one polynomial, ends within 0.7 ... 1.2                |
| `polar_express` | at least 8       | Amsel et al. 2025 (arXiv 2505.16932)                                |
"""

from __future__ import annotations

from minimegatron.errors import require

Round = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Round, ...]] = {
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "simple": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}


def coefficients_of(kind: str, rounds: int) -> tuple[Round, ...]:
    """a, b, c of each round.

    Raises:
        ConfigError: the set is not made for so many rounds.
    """
    found = COEFFICIENTS[kind]
    if kind == "polar_express":
        require(
            rounds >= len(found),
            f"muon_num_ns_steps={rounds} with muon_coefficient_type='polar_express'",
            f"at least {len(found)}",
        )
        return (*found, *found[-1:] * (rounds - len(found)))
    require(
        rounds % len(found) == 0,
        f"muon_num_ns_steps={rounds} with muon_coefficient_type={kind!r}, a set of {len(found)} polynomials",
        f"a multiple of {len(found)}, or --muon-coefficient-type simple",
    )
    return found * (rounds // len(found))
