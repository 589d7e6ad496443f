"""A bar for work that takes long: seen only once it has taken two seconds, and by whoever asked for it."""

from __future__ import annotations

import sys

from tqdm import tqdm


def long_work(total: int, what: str, shown: bool) -> tqdm:
    """A bar on stderr; `update` it with what is done, and `close` it.

    Args:
        total: how much there is to do.
        what: in a word.
        shown: on one rank of many. Where stderr is no terminal, a line every half minute.
    """
    pause = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(total=total, desc=what, unit_scale=True, delay=2.0, mininterval=pause, leave=False, disable=not shown)
