"""Checks of lab 12, in the order of a plan: what a rank holds, what it sends, how long a step takes, which layout.

| part                 | exercises                      |
|----------------------|--------------------------------|
| `checks/states`      | stage_parameters, state_bytes  |
| `checks/activations` | activation_bytes               |
| `checks/messages`    | bytes_sent                     |
| `checks/links`       | axis_seconds                   |
| `checks/seconds`     | step_time                      |
| `checks/legal`       | legal                          |
| `checks/replicas`    | replicas                       |
| `checks/capstone`    | run_1024                       |
| `checks/changed`     | changed                        |
| `checks/goodput`     | goodput                        |
| `checks/two_runs`    | two_runs                       |
| `checks/asked`       | asked                          |

The package's own planner is closed to answers; the capstone's judge uses it.
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.activations import ACTIVATIONS
from .checks.asked import ASKED
from .checks.capstone import CAPSTONE
from .checks.changed import CHANGED
from .checks.goodput import GOODPUT
from .checks.legal import LEGAL
from .checks.links import LINKS
from .checks.messages import SENT
from .checks.replicas import REPLICAS
from .checks.seconds import STEP
from .checks.states import PARAMETERS, STATES
from .checks.two_runs import TWO_RUNS

PLANNER = ("minimegatron.planner", "minimegatron.footprint", "minimegatron.config", "minimegatron.comm.mesh")
MEMORY, TIME = [PARAMETERS, STATES, ACTIVATIONS], [SENT, LINKS, STEP, LEGAL]
EXERCISES = [*MEMORY, *TIME, REPLICAS, CAPSTONE, CHANGED, GOODPUT, TWO_RUNS, ASKED]
LAB = Lab("12_planning", EXERCISES, without=(*CLOSED, *PLANNER))
