"""Checks of lab 06, in the order of a training step: gradients become shards, shards are clipped and updated, weights
come back.

| part               | exercises                       |
|--------------------|---------------------------------|
| `checks/predicted` | bytes_held, bytes_sent, answers |
| `checks/layout`    | lay_out, my_pieces              |
| `checks/gradients` | reduce_early                    |
| `checks/optimizer` | sharded_adamw, clip             |
| `checks/gathers`   | gather_on_use                   |
| `checks/fsdp2`     | fsdp2                           |
| `checks/sums`      | sums                            |
| `checks/machines`  | tokens_to_hide, hybrid          |
| `checks/suspects`  | suspects                        |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.fsdp2 import FSDP2
from .checks.gathers import ON_USE
from .checks.gradients import REDUCE
from .checks.layout import LAY_OUT, PIECES
from .checks.machines import HYBRID, TOKENS
from .checks.optimizer import ADAMW, CLIP
from .checks.predicted import HELD, QUESTIONS, SENT
from .checks.sums import SUMS
from .checks.suspects import SUSPECTS

LAB = Lab(
    "06_data_parallel_zero",
    [HELD, SENT, LAY_OUT, PIECES, REDUCE, ADAMW, ON_USE, FSDP2, SUMS, TOKENS, HYBRID, SUSPECTS, CLIP, QUESTIONS],
    without=CLOSED,
)
