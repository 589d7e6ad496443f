"""Checks of lab 04: a sequence cut over ranks, and attention over all of it.

| part               | exercises                                                  |
|--------------------|------------------------------------------------------------|
| `checks/predicted` | work, bytes_per_layer, positions, answers                  |
| `checks/attention` | attend                                                     |
| `checks/pieces`    | merge, piece_backward                                      |
| `checks/forward`   | ring_forward, ulysses                                      |
| `checks/packed`    | deal                                                       |
| `checks/backward`  | ring_backward, blocks_used                                 |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.attention import ATTEND
from .checks.backward import BACK, USED
from .checks.forward import RING, ULYSSES
from .checks.packed import DEAL
from .checks.pieces import MERGE, PIECE
from .checks.predicted import BYTES, POSITIONS, QUESTIONS, WORK

LAB = Lab(
    "04_context_parallel",
    [WORK, BYTES, ATTEND, MERGE, POSITIONS, RING, DEAL, PIECE, BACK, ULYSSES, USED, QUESTIONS],
    without=CLOSED,
)
