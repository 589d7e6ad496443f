"""Checks of lab 03: schedules of a pipeline as lists, and the gradients that they must not lose.

| part               | exercises                                        |
|--------------------|--------------------------------------------------|
| `part03_predicted` | bubble, answers                                  |
| `part03_lists`     | gpipe, one_f_one_b, interleaved, zb_h1           |
| `part03_gradients` | split_stage, sync_tied, survivors                |
"""

from __future__ import annotations

from minimegatron.lab.course.part03_gradients import STAGE, SURVIVORS, TIED
from minimegatron.lab.course.part03_lists import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from minimegatron.lab.course.part03_predicted import BUBBLE, QUESTIONS
from minimegatron.lab.exercises import Lab

LAB = Lab(
    "03_pipeline_1f1b", [BUBBLE, GPIPE, ONE_F_ONE_B, INTERLEAVED, STAGE, ZB_H1, TIED, SURVIVORS, QUESTIONS]
)
