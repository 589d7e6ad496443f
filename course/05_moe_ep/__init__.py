"""Checks of lab 05, in the order of what a token meets: it is routed, becomes rows, travels, is worked on, comes back.

| part                 | exercises                                |
|----------------------|------------------------------------------|
| `checks/predicted`   | bytes_per_layer, expected_drops, answers |
| `checks/routing`     | route                                    |
| `checks/balance`     | balance, expert_bias                     |
| `checks/permutation` | permute                                  |
| `checks/dispatch`    | dispatch                                 |
| `checks/limit`       | limit                                    |
| `checks/finish`      | finish                                   |
| `checks/machines`    | machines                                 |
| `checks/suspects`    | suspects                                 |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.balance import BALANCE, BIAS
from .checks.dispatch import DISPATCH
from .checks.finish import FINISH
from .checks.limit import LIMIT
from .checks.machines import MACHINES
from .checks.permutation import PERMUTE
from .checks.predicted import BYTES, DROPS, QUESTIONS
from .checks.routing import ROUTE
from .checks.suspects import SUSPECTS

LAB = Lab(
    "05_moe_ep",
    [BYTES, DROPS, ROUTE, BALANCE, BIAS, PERMUTE, DISPATCH, LIMIT, FINISH, MACHINES, SUSPECTS, QUESTIONS],
    without=CLOSED,
)
