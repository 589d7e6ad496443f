"""How much of the communication of data parallelism hides behind computation: layers and a network that sleep.

    OMP_NUM_THREADS=1 python -m benchmarks.overlap            some four minutes
    OMP_NUM_THREADS=1 python -m benchmarks.overlap --smoke    seconds

On gloo the network *is* the processor, so nothing can hide behind anything. Here a layer sleeps 30 ms forward and 60 ms
backward, and a message takes as long as its bytes of a ring need on a link that carries one after the other
(`Link`); it is really sent too, but it is small. `link` is the time of a reduce-scatter of all gradients over the time
of all computation; an all-reduce takes twice that, an all-gather of all weights as long.

| stage        | communication of a step           | what nothing can hide                             |
|--------------|-----------------------------------|---------------------------------------------------|
| no shards    | all-reduce                        | the bucket of the layer that is backward's last   |
| ZeRO-1, -2   | reduce-scatter, all-gather        | that one, and the weights of the first layer      |
| ZeRO-3       | the same, and another all-gather  | that one, and the first gather of a forward pass  |

Reported: the time of a step; *exposed*, what it is longer than on a link that takes no time; and by how much it is
shorter than without the switch. ZeRO-3 has no switch for gathers ahead of use: `no prefetch` takes them away.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.bubble import last_exactly
from labkit.ranks.pool import WarmPool
from minimegatron.comm.async_ops import transport
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import barrier
from minimegatron.comm.gloo import GlooTransport
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.transport import Started
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.param_buffer import GatherOnUse

ELEMENTS = 4096  # weights of a layer; what is in no list has an eighth
GRADS, PARAMS, PREFETCH = "overlap_grad_reduce", "overlap_param_gather", "prefetch"
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    ("no shards", "no_shard", ()),
    ("no shards", "no_shard", (GRADS,)),
    ("ZeRO-1", "optim", ()),
    ("ZeRO-1", "optim", (GRADS,)),
    ("ZeRO-1", "optim", (GRADS, PARAMS)),
    ("ZeRO-2", "optim_grads", ()),
    ("ZeRO-2", "optim_grads", (GRADS,)),
    ("ZeRO-2", "optim_grads", (GRADS, PARAMS)),
    ("ZeRO-3", "optim_grads_params", ()),
    ("ZeRO-3", "optim_grads_params", (PREFETCH,)),
    ("ZeRO-3", "optim_grads_params", (PREFETCH, GRADS)),
]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        last_exactly(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        last_exactly(2 * ctx.seconds)
        return grads[0], torch.ones(ctx.shape), None


class Sleeper(nn.Module):
    """A layer whose work is sleep."""

    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-any-return]


class Sleepers(nn.Module):
    """An embedding, layers, and an output layer."""

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.first = Sleeper(ELEMENTS // 8, seconds)
        self.layers = nn.ModuleList(Sleeper(ELEMENTS, seconds) for _ in range(layers))
        self.last = Sleeper(ELEMENTS // 8, seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Link(GlooTransport):
    """A network that carries one message after the other.

    Args:
        seconds_per_byte: how slow it is.

    Attributes:
        busy: seconds that it was in use.
    """

    def __init__(self, seconds_per_byte: float) -> None:
        self._seconds_per_byte = seconds_per_byte
        self._free = self.busy = 0.0

    def all_reduce(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, op: str) -> Started:
        return self._late(2.0, x, axis, super().all_reduce(x, output, axis, op))

    def all_gather(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        return self._late(float(axis.size), x, axis, super().all_gather(x, output, axis))

    def reduce_scatter(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        return self._late(1.0, x, axis, super().reduce_scatter(x, output, axis))

    def _late(self, share: float, x: torch.Tensor, axis: Axis, started: Started) -> Started:
        """It has arrived when the link says so; `share` is of (D-1)/D of the tensor, what a ring sends."""
        seconds = share * (axis.size - 1) / axis.size * x.numel() * x.element_size() * self._seconds_per_byte
        self._free = at = max(self._free, time.perf_counter()) + seconds
        self.busy += seconds

        def finish() -> None:
            last_exactly(at - time.perf_counter())
            if started.finish is not None:
                started.finish()

        return Started(started.handles, finish)


def milliseconds(
    rank: int, world: int, sharding: str, switches: tuple[str, ...], link: float, layers: int, seconds: float, n: int
) -> list[tuple[float, float]]:
    """(wall, link in use) of a step, for each of n rounds of two steps."""
    mesh = Mesh.build(ParallelConfig())
    ddp = DistributedDataParallel(
        Sleepers(layers, seconds), mesh, ELEMENTS, GRADS in switches, sharding=sharding,
        overlap_param_gather=PARAMS in switches,
    )  # fmt: skip
    optimizer = build_optimizer(OptimizerConfig(lr=0.0), ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    nbytes = 4 * sum(p.numel() for p in ddp.params.values()) * (world - 1) / world
    network = Link(link * 3 * (layers + 2) * seconds / nbytes)
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        ddp.zero_grad_buffer()
        y = ddp(x)
        with ddp.backward_pass():
            y.backward()
        ddp.finish_grad_sync()
        optimizer.step()

    found = []
    ahead = mock.patch.object(GatherOnUse, "_after", lambda *_: None)
    with contextlib.nullcontext() if PREFETCH in switches else ahead, transport(network):
        step()
        for _ in range(n):
            barrier(mesh.dp)
            begun, busy = time.perf_counter(), network.busy
            for _ in range(2):
                step()
            found.append((500 * (time.perf_counter() - begun), 500 * (network.busy - busy)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="short: does it run?")
    parser.add_argument("--link", type=float, nargs="*", default=[0.2, 0.4])
    args = parser.parse_args()
    from benchmarks.overlap import milliseconds as timed  # ranks import a function by the name of its module

    layers, seconds, rounds = (2, 0.002, 1) if args.smoke else (8, 0.03, 4)
    print(f"{layers} layers and two more, {1000 * seconds:g} ms forward, twice backward; 2 ranks; best of {rounds}")
    with WarmPool(2) as pool:

        def best(link: float, sharding: str, switches: tuple[str, ...]) -> tuple[float, float]:
            per_rank = pool.run(timed, sharding, switches, link, layers, seconds, rounds, timeout=300)
            return min(max(of) for of in zip(*per_rank, strict=True))

        for link in args.link:
            for name, cases in itertools.groupby(CASES, key=lambda case: case[0]):
                without = 0.0
                for _, sharding, switches in cases:
                    (wall, busy), (free, _) = best(link, sharding, switches), best(0.0, sharding, switches)
                    without = without or wall
                    print(
                        f"link {link:g}  {name:9}  {' + '.join(switches) or 'nothing overlaps':40} {wall:6.1f} ms  "
                        f"network {busy:6.1f}  exposed {wall - free:6.1f}  shorter by {1 - wall / without:6.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
