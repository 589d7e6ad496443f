"""Checks of lab 05, in the order of what a token meets: it is routed, becomes rows, travels, is worked on, comes back.

| part               | exercises                                                |
|--------------------|----------------------------------------------------------|
| `checks/predicted` | bytes_per_layer, expected_drops, suspects, answers       |
| `checks/routing`   | route, limit                                             |
| `checks/balance`   | balance, expert_bias                                     |
| `checks/dispatch`  | permute, dispatch, finish                                |
"""

from __future__ import annotations

from labkit.exercises import Lab

from .checks.balance import BALANCE, BIAS
from .checks.dispatch import DISPATCH, FINISH, PERMUTE
from .checks.predicted import BYTES, DROPS, QUESTIONS, SUSPECTS
from .checks.routing import LIMIT, ROUTE

LAB = Lab("05_moe_ep", [BYTES, DROPS, ROUTE, BALANCE, BIAS, PERMUTE, DISPATCH, LIMIT, FINISH, SUSPECTS, QUESTIONS])
