"""Record what Megatron's `OptimizerParamScheduler` sets, step by step, for every style.

Each case has two parameter groups: one that follows the scheduler's own numbers, one with a peak and a floor of its own
(as Megatron's `decoupled_lr`) and no weight decay. The trace starts at step 0, before the first `step`.
"""

from __future__ import annotations

import types
from typing import Any

BASE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 2,
    "lr_decay_steps": 10,
    "lr_decay_style": "linear",
    "start_wd": 0.01,
    "end_wd": 0.01,
    "wd_incr_steps": 10,
    "wd_incr_style": "constant",
    "wsd_decay_steps": None,
    "lr_wsd_decay_style": None,
}
SAMPLES = {"lr_warmup_steps": 2048, "lr_decay_steps": 20480, "wd_incr_steps": 20480, "max_lr": 3e-4, "min_lr": 3e-5}

CASES: dict[str, dict[str, Any]] = {
    "constant": {"lr_decay_style": "constant"},
    "linear": {},
    "cosine": {"lr_decay_style": "cosine"},
    "inverse-square-root": {"lr_decay_style": "inverse-square-root"},
    "inverse-square-root above its floor": {
        "lr_decay_style": "inverse-square-root",
        "lr_decay_steps": 40,
        "min_lr": 0.3,
    },
    "WSD exponential": {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "exponential"},
    "WSD linear": {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"},
    "WSD cosine": {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "cosine"},
    "WSD minus_sqrt": {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "minus_sqrt"},
    "no warm-up": {"lr_warmup_steps": 0, "lr_decay_style": "cosine"},
    "no warm-up, inverse-square-root": {"lr_warmup_steps": 0, "lr_decay_style": "inverse-square-root"},
    "warm-up from above zero": {"init_lr": 0.05, "lr_warmup_steps": 5},
    "weight decay linear": {"end_wd": 0.1, "wd_incr_style": "linear"},
    "weight decay cosine": {"end_wd": 0.1, "wd_incr_style": "cosine", "wd_incr_steps": 7},
    "counted in samples, cosine": {**SAMPLES, "lr_decay_style": "cosine"},
    "counted in samples, WSD": {
        **SAMPLES,
        "lr_decay_style": "WSD",
        "wsd_decay_steps": 5000,
        "lr_wsd_decay_style": "linear",
    },
}


def make() -> dict[str, Any]:
    """Per case: the arguments, the increments, and per step [lr, weight decay] of each of the two groups."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    cases = {}
    for name, changes in CASES.items():
        arguments = {**BASE, **changes}
        own = {"max_lr": 2 * arguments["max_lr"], "min_lr": 0.5 * arguments["min_lr"], "wd_mult": 0.0}
        optimizer = types.SimpleNamespace(param_groups=[{}, dict(own)])
        scheduler = OptimizerParamScheduler(optimizer, **arguments)
        increments = [1] * (arguments["lr_decay_steps"] + 2) if arguments["lr_decay_steps"] < 100 else [1024, 512] * 14
        trace = [[[g["lr"], g["weight_decay"]] for g in optimizer.param_groups]]
        for increment in increments:
            scheduler.step(increment)
            trace.append([[g["lr"], g["weight_decay"]] for g in optimizer.param_groups])
        cases[name] = {"arguments": arguments, "second_group": own, "increments": increments, "trace": trace}
    return {"cases": cases}
