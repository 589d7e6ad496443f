"""Checks of lab 01: who talks to whom, and what a sum over ranks costs.

| part               | exercises                                                |
|--------------------|----------------------------------------------------------|
| `checks/predicted` | bytes_sent, axis_groups, my_samples, last_arrival, answers |
| `checks/ranks`     | ring_all_reduce, conjugates, rank_loss                   |
| `checks/buckets`   | overlap                                                  |
| `checks/order`     | ordered                                                  |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.buckets import BUCKETS
from .checks.order import ORDER
from .checks.predicted import ARRIVAL, BYTES, GROUPS, QUESTIONS, SAMPLER
from .checks.ranks import LOSS, PAIR, RING

LAB = Lab(
    "01_process_groups",
    [BYTES, GROUPS, RING, PAIR, SAMPLER, ARRIVAL, BUCKETS, ORDER, LOSS, QUESTIONS],
    without=CLOSED,
)
