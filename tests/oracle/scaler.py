"""Record how Megatron's `DynamicGradScaler` answers a given sequence of overflows."""

from __future__ import annotations

from typing import Any

from tests.oracle.megatron_cpu import CudaMeansCpu

BASE = {
    "initial_scale": 16.0,
    "min_scale": 1.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "hysteresis": 2,
}

# Changes to BASE, and the overflows (1) and clean steps (0) in order.
CASES: dict[str, tuple[dict[str, float], str]] = {
    "grow, back off, recover": ({}, "0001110000"),
    "hysteresis is refilled only by growth": ({}, "1010101001000111"),
    "never below the floor": ({"min_scale": 4.0, "hysteresis": 1}, "11111000000"),
    "no hysteresis": ({"hysteresis": 1}, "10100010001000000"),
    "backs off by a quarter": ({"backoff_factor": 0.75, "hysteresis": 1, "growth_interval": 2}, "1100001100"),
    "defaults of fp16 training": ({"initial_scale": 2.0**32, "growth_interval": 1000}, "1" * 20 + "0" * 5 + "1"),
}


def make() -> dict[str, Any]:
    """Per case: the arguments, the overflows, and after each step [scale, growth tracker, hysteresis tracker]."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    cases = {}
    with CudaMeansCpu():
        for name, (changes, overflows) in CASES.items():
            arguments = {**BASE, **changes}
            scaler = DynamicGradScaler(**arguments)
            trace = []
            for overflow in overflows:
                scaler.update(overflow == "1")
                state = scaler.state_dict()
                trace.append([state["scale"].item(), state["growth_tracker"], state["hysteresis_tracker"]])
            cases[name] = {"arguments": arguments, "overflows": [c == "1" for c in overflows], "trace": trace}
    return {"cases": cases}
