"""Checks of lab 09, in the order of a run: its cost, its data, its rate, its size, its end and its faults.

| part              | exercises                 |
|-------------------|---------------------------|
| `checks/flops`    | mfu                       |
| `checks/tokens`   | merge_round               |
| `checks/samples`  | epochs, pieces            |
| `checks/rates`    | rate                      |
| `checks/law`      | fit                       |
| `checks/work`     | step_work                 |
| `checks/evidence` | forgotten, bad_samples    |
| `checks/planned`  | answers                   |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.evidence import BAD, FORGOTTEN
from .checks.flops import MFU
from .checks.law import FIT
from .checks.planned import ANSWERS
from .checks.rates import RATE
from .checks.samples import EPOCHS, PIECES
from .checks.tokens import MERGE
from .checks.work import WORK

LAB = Lab(
    "09_training_end_to_end",
    [MFU, EPOCHS, MERGE, PIECES, RATE, FIT, WORK, BAD, FORGOTTEN, ANSWERS],
    without=CLOSED,
)
