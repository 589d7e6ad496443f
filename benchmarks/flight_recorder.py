"""What the flight recorder costs: microseconds of a call, and the share of a step that its calls are.

    python -m benchmarks.flight_recorder --calls 60 --step-ms 900

Calls are all-reduces over a transport that moves nothing, issued and waited for below a stack as deep as a layer's, in
CPU seconds of this process: with the recorder, without it, and with `--log-straggler`'s clock. The least of `--rounds`
counts. `--calls` and `--step-ms` are of a step of the run that you have in mind (a log line has the latter, and
`minimegatron flight-recorder` the calls of a rank).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch

from minimegatron.comm.async_ops import alone
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.flight_recorder import FlightRecorder
from minimegatron.comm.transport import FakeTransport
from minimegatron.training.observers.stragglers import Sections

CALLS, DEPTH = 2000, 30


def below(depth: int, x: torch.Tensor, axis: Axis) -> None:
    """`CALLS` calls, with so many more frames around them."""
    if depth:
        below(depth - 1, x, axis)
        return
    for _ in range(CALLS):
        all_reduce(x, axis)


def seconds(observers: tuple[Any, ...], inside: Any = contextlib.nullcontext) -> float:
    """CPU seconds of a call."""
    x, axis = torch.zeros(64, 64), Axis("tp", (0, 1), 0)
    with alone(FakeTransport(), *observers), inside():
        begin = time.process_time()
        below(DEPTH, x, axis)
        return (time.process_time() - begin) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="communications of a step")
    parser.add_argument("--step-ms", type=float, default=900.0, help="milliseconds of a step")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    without = min(seconds(()) for _ in range(args.rounds))
    recorded = min(seconds((FlightRecorder(2000),)) for _ in range(args.rounds))
    measured = min(seconds((), lambda: Sections(torch.device("cpu"))) for _ in range(args.rounds))
    print(f"a call without: {1e6 * without:.1f} us")
    for name, cost in (("the flight recorder", recorded - without), ("--log-straggler", measured - without)):
        share = 100 * args.calls * 1000 * cost / args.step_ms
        print(f"{name}: {1e6 * cost:.1f} us more; {args.calls} calls of a step of {args.step_ms:g} ms: {share:.3f} %")


if __name__ == "__main__":
    main()
