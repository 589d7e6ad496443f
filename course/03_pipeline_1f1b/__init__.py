"""Checks of lab 03: schedules of a pipeline as lists, and the gradients that they must not lose.

| part               | exercises                                        |
|--------------------|--------------------------------------------------|
| `checks/predicted` | bubble, answers                                  |
| `checks/schedules` | gpipe, one_f_one_b, interleaved, zb_h1           |
| `checks/halves`    | split_stage                                      |
| `checks/gradients` | sync_tied, survivors                             |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.gradients import SURVIVORS, TIED
from .checks.halves import STAGE
from .checks.predicted import BUBBLE, QUESTIONS
from .checks.schedules import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1

LAB = Lab(
    "03_pipeline_1f1b",
    [BUBBLE, GPIPE, ONE_F_ONE_B, INTERLEAVED, STAGE, ZB_H1, TIED, SURVIVORS, QUESTIONS],
    without=[name for name in CLOSED if name != "minimegatron.parallel"],
)
