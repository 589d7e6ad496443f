"""Checks of lab 08, in the order of a checkpoint's life: written, published, read in another layout, gone on with.

| part                | exercises             |
|---------------------|-----------------------|
| `checks/costs`      | costs                 |
| `checks/regions`    | boxes_of, load_box    |
| `checks/commit`     | save_checkpoint       |
| `checks/together`   | save_shard            |
| `checks/background` | async_saver           |
| `checks/resume`     | resume                |
| `checks/formats`    | regions_of, load_rows |
| `checks/published`  | from_hf               |
| `checks/moments`    | whose, by_name        |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.background import BACKGROUND
from .checks.commit import SAVE
from .checks.costs import COSTS
from .checks.formats import REGIONS, ROWS
from .checks.moments import BY_NAME, WHOSE
from .checks.published import FROM_HF
from .checks.regions import BOXES, LOAD
from .checks.resume import RESUME
from .checks.together import TOGETHER

LAB = Lab(
    "08_checkpoints",
    [COSTS, BOXES, LOAD, SAVE, TOGETHER, BACKGROUND, RESUME, REGIONS, ROWS, FROM_HF, WHOSE, BY_NAME],
    without=CLOSED,
)
