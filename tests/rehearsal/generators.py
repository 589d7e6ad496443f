"""Random numbers of a GPU: a generator a device, apart from the CPU's.

Operators that draw are computed by CPU kernels, which draw from the CPU's default generator; so its state is exchanged
for the time of one operator. Equal seeds give equal numbers on both, which a real GPU does not promise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.cache
def default(index: int) -> torch.Generator:
    """The default generator of a GPU."""
    return torch.Generator(torch.device("cuda", index))


@contextlib.contextmanager
def drawing_from(generator: torch.Generator | None, index: int, draws: bool = True) -> Iterator[None]:
    """Inside, the CPU's default generator continues this one, or the default one of GPU `index`."""
    if not draws:
        yield
        return
    theirs, before = generator if generator is not None else default(index), torch.get_rng_state()
    torch.set_rng_state(theirs.get_state())
    try:
        yield
    finally:
        theirs.set_state(torch.get_rng_state())
        torch.set_rng_state(before)
