"""Checks of lab 04: a sequence cut over ranks, and attention over all of it.

| part               | exercises                                                  |
|--------------------|------------------------------------------------------------|
| `checks/predicted` | work, bytes_per_layer, positions, answers                  |
| `checks/block`     | attend, merge, piece_backward                              |
| `checks/travel`    | ring_forward, ulysses                                      |
| `checks/back`      | ring_backward, blocks_used                                 |
"""

from __future__ import annotations

from labkit.exercises import Lab

from .checks.back import BACK, USED
from .checks.block import ATTEND, MERGE, PIECE
from .checks.predicted import BYTES, POSITIONS, QUESTIONS, WORK
from .checks.travel import RING, ULYSSES

LAB = Lab(
    "04_context_parallel",
    [WORK, BYTES, ATTEND, MERGE, POSITIONS, RING, PIECE, BACK, ULYSSES, USED, QUESTIONS],
)
