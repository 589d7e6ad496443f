"""Checks of lab 11, in the order of a model's schooling: examples, adapters, pairs, rewards, and who draws the answers.

| part                 | exercises                 |
|----------------------|---------------------------|
| `checks/sizes`       | adapter_state             |
| `checks/weights`     | token_weights             |
| `checks/spoken`      | spoken                    |
| `checks/adapters`    | adapter                   |
| `checks/pairs`       | dpo                       |
| `checks/groups`      | advantages                |
| `checks/policy`      | policy_loss               |
| `checks/divergence`  | kl_estimates              |
| `checks/engines`     | importance, old_tokens    |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.adapters import ADAPTER
from .checks.divergence import KL
from .checks.engines import IMPORTANCE, OLD
from .checks.groups import ADVANTAGES
from .checks.pairs import DPO
from .checks.policy import POLICY
from .checks.sizes import SIZES
from .checks.spoken import SPOKEN
from .checks.weights import WEIGHTS

LAB = Lab(
    "11_post_training",
    [SIZES, WEIGHTS, SPOKEN, ADAPTER, DPO, ADVANTAGES, POLICY, KL, IMPORTANCE, OLD],
    without=CLOSED,
)
