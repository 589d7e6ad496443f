"""Checks of lab 04: a sequence cut over ranks, and attention over all of it.

| part               | exercises                                                  |
|--------------------|------------------------------------------------------------|
| `part04_predicted` | work, bytes_per_layer, positions, answers                  |
| `part04_block`     | attend, merge, piece_backward                              |
| `part04_travel`    | ring_forward, ulysses                                      |
| `part04_back`      | ring_backward, blocks_used                                 |
"""

from __future__ import annotations

from minimegatron.lab.course.part04_back import BACK, USED
from minimegatron.lab.course.part04_block import ATTEND, MERGE, PIECE
from minimegatron.lab.course.part04_predicted import BYTES, POSITIONS, QUESTIONS, WORK
from minimegatron.lab.course.part04_travel import RING, ULYSSES
from minimegatron.lab.exercises import Lab

LAB = Lab(
    "04_context_parallel",
    [WORK, BYTES, ATTEND, MERGE, POSITIONS, RING, PIECE, BACK, ULYSSES, USED, QUESTIONS],
)
