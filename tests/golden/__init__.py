"""Numbers that Megatron-Core 0.16.1 printed, frozen as JSON so that tests need neither Megatron nor minutes.

| `load(...)`    | what it holds                                                         |
|----------------|-----------------------------------------------------------------------|
| `groups`       | rank groups of 45 layouts, up to 4,096 ranks                          |
| `schedule`     | learning rate and weight decay, step by step                          |
| `scaler`       | dynamic loss scale under given overflows                              |
| `microbatches` | batch size ramp-up                                                    |
| `slots`        | schedule tables and warm-up counts of the pipeline                    |
| `gpt`          | ten training steps of four tiny models: loss, gradient norm, and more |
| `moe`          | a layer with experts under several routers; three steps of training   |
| `mtp`          | every gradient norm of a model that predicts three tokens             |
| `zero`         | shards of the distributed optimizer; twenty steps with it             |

`megatron_X.json` was written by `tests/oracle/X.py`, whose docstring explains it.

Regenerate with `python -m tests.oracle.regenerate --only groups`. `megatron_names.py` says how the weights and tokens
behind `megatron_gpt.json` are drawn, so that another implementation can start from the same numbers.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).parent


def load(name: str) -> Any:
    """The frozen content of `megatron_<name>.json`."""
    return json.loads((HERE / f"megatron_{name}.json").read_text())
