"""Checks of lab 10, in the order of a request: what a step costs, where keys lie, who is computed, what is drawn.

| part               | exercises    |
|--------------------|--------------|
| `checks/cost`      | decode_step  |
| `checks/pages`     | attend       |
| `checks/prefixes`  | prefixes     |
| `checks/steps`     | schedule     |
| `checks/proposals` | verify       |
| `checks/evidence`  | diagnose     |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.cost import DECODE
from .checks.evidence import DIAGNOSE
from .checks.pages import ATTEND
from .checks.prefixes import PREFIXES
from .checks.proposals import VERIFY
from .checks.steps import SCHEDULE

LAB = Lab("10_inference_serving", [DECODE, ATTEND, PREFIXES, SCHEDULE, VERIFY, DIAGNOSE], without=CLOSED)
