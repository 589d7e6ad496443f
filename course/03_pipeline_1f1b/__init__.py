"""Checks of lab 03: schedules of a pipeline as lists, and the gradients that they must not lose.

| part               | exercises                                        |
|--------------------|--------------------------------------------------|
| `checks/predicted` | bubble, answers                                  |
| `checks/schedules` | gpipe, one_f_one_b, interleaved, zb_h1, beat     |
| `checks/warm_up`   | warm_up                                          |
| `checks/halves`    | split_stage                                      |
| `checks/executor`  | graph_stage, execute, crossed                    |
| `checks/gradients` | sync_tied                                        |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.executor import CROSSED, EXECUTE, GRAPH_STAGE
from .checks.gradients import TIED
from .checks.halves import STAGE
from .checks.predicted import BUBBLE, QUESTIONS
from .checks.schedules import BEAT, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from .checks.warm_up import WARM_UP

LAB = Lab(
    "03_pipeline_1f1b",
    [
        BUBBLE, GPIPE, ONE_F_ONE_B, INTERLEAVED, WARM_UP, STAGE, ZB_H1, BEAT, GRAPH_STAGE, EXECUTE, TIED, CROSSED,
        QUESTIONS,
    ],
    without=[name for name in CLOSED if name != "minimegatron.parallel"],
)  # fmt: skip
