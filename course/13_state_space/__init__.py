"""Checks of lab 13: a layer that keeps a state in place of a cache, its recurrence in three forms, and hybrids.

| part             | exercises                            |
|------------------|--------------------------------------|
| `checks/kept`    | kept_bytes                           |
| `checks/forms`   | recurrence, as_attention, chunked    |
| `checks/ranks`   | state_before                         |
| `checks/stages`  | stages                               |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.forms import ATTENTION, CHUNKED, RECURRENCE
from .checks.kept import KEPT
from .checks.ranks import BEFORE
from .checks.stages import STAGES

LAB = Lab(
    "13_state_space", [KEPT, RECURRENCE, ATTENTION, CHUNKED, BEFORE, STAGES], without=(*CLOSED, "minimegatron.planner")
)
