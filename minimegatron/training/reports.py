"""Sums the losses of a step over all ranks, and reads them from the device: one message, one read.

Whenever the host reads a number, it waits until the GPU has finished its queue, and the GPU then idles until the host
has launched more. A step that reads four numbers one after the other is idle four times. So counts and sums stay on
the device until the step needs them to decide, and are read together:

    [ sum, count of each loss ..., asks to stop ]      summed over `world`; in a pipeline also: has new names
    [ token count, loads of experts ... ]              summed before, and read in the same copy

| the host waits                                          | how often               |
|---------------------------------------------------------|-------------------------|
| here                                                    | once a step, evaluation |
| for norm, zeros, non-finite tensors (`optim/optimizer`) | once a step             |
| for the counts of experts (`layers/moe/dispatch`)       | once a layer and pass   |
| for the boundaries of documents (`layers/attention/mask`) | once a microbatch     |

**Names.** Only the last stage of a pipeline has losses, and every rank must send as many numbers. The last stage sends
their names once, in a message of their own. If it ever has others, the number `has new names` tells all ranks, and the
names are sent again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from minimegatron import trace
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import BadStep

if TYPE_CHECKING:
    from minimegatron.layers.moe.balance import LayerLoad
    from minimegatron.parallel.data.data_parallel import DataParallel


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The report of one training step, the same on every rank.

    Attributes:
        losses: name -> mean over the counted tokens of the whole batch.
        num_tokens: tokens that counted, over all ranks.
        grad_norm: global gradient norm before clipping; None when it was not computed.
        learning_rate: learning rate after this step, as Megatron logs it.
        loss_scale: loss scale of this step; 1 without loss scaling.
        skipped: the optimizer made no update (fp16 overflow).
        num_zeros: zeros in the gradient, when counted.
        experts: the routing of each layer with experts.
        stop: some rank asked for the end of the run.
    """

    losses: dict[str, float]
    num_tokens: int
    grad_norm: float | None
    learning_rate: float
    loss_scale: float = 1.0
    skipped: bool = False
    num_zeros: int | None = None
    experts: tuple[LayerLoad, ...] = ()
    stop: bool = False

    def decided(self) -> dict[str, float]:
        """The numbers with which each rank has updated its own part of the weights; they must be equal on all ranks."""
        norm = math.nan if self.grad_norm is None else self.grad_norm
        return {"gradient norm": norm, "learning rate": self.learning_rate, "loss scale": self.loss_scale}


@dataclasses.dataclass(frozen=True)
class Totals:
    """The numbers that `reduce_reports` has read; equal on all ranks.

    Attributes:
        losses: name -> mean over all counted tokens; 0 if none counted.
        counts: name -> number of these tokens, times tp, because all ranks of tp add their copies.
        stop: some rank asked to stop.
        num_tokens: the argument `num_tokens`; a loss mask may have weights, so it need not be an integer.
        hook_tables: the numbers of each tensor of `hook_tables`, flat.
    """

    losses: dict[str, float]
    counts: dict[str, float]
    stop: bool
    num_tokens: float
    hook_tables: list[list[float]]


class Sums:
    """The sums of a rank over its microbatches, in fp64: tokens that count, and [sum, count] of each loss by name."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.reports: dict[str, torch.Tensor] = {}

    def add(self, num_tokens: torch.Tensor, report: dict[str, torch.Tensor]) -> None:
        self.tokens += num_tokens.detach()
        for name, pair in report.items():
            self.reports[name] = self.reports.get(name, 0.0) + pair.detach().double()


def reduce_reports(
    reports: dict[str, torch.Tensor],
    model: DataParallel,
    *,
    num_tokens: torch.Tensor | None = None,
    hook_tables: Sequence[torch.Tensor] = (),
    asks_to_stop: bool = False,
) -> Totals:
    """Add up [sum, count] pairs over the world, in one message, and read them; waits for the device, once.

    Args:
        reports: name -> [sum, count] of this rank, fp64; the same names on all ranks, or none on pipeline stages
            before the last.
        model: the model; it remembers the names of the losses on pipeline stages that have none.
        num_tokens: fp64, equal on all ranks, read in the same copy.
        hook_tables: more fp64 tensors, equal on all ranks, read in the same copy.
        asks_to_stop: this rank wants the run to end (a signal, the time is up).
    """
    mesh = model.mesh
    names = _names(reports, model)
    flags = [asks_to_stop] if mesh.pp.size == 1 else [asks_to_stop, bool(reports) and list(reports) != names]
    zero = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    pairs = [reports.get(name, zero).double() for name in names]
    # made on the device: a copy of a number of the host would make the host wait
    raised = [torch.full((1,), float(flag), dtype=torch.float64, device=mesh.device) for flag in flags]
    summed = all_reduce(torch.cat(pairs + raised), mesh.world)
    tables = [table.double().flatten() for table in ([] if num_tokens is None else [num_tokens]) + [*hook_tables]]
    numbers = torch.cat([summed, *tables]).tolist()  # the host waits

    sums, counts = numbers[: 2 * len(names) : 2], numbers[1 : 2 * len(names) : 2]
    stop, *new_names = numbers[2 * len(names) : len(summed)]
    if any(new_names):
        model.loss_names.clear()
        return reduce_reports(reports, model, num_tokens=num_tokens, hook_tables=hook_tables, asks_to_stop=asks_to_stop)
    rest = iter(numbers[len(summed) :])
    return Totals(
        losses={name: total / count if count else 0.0 for name, total, count in zip(names, sums, counts, strict=True)},
        counts=dict(zip(names, counts, strict=True)),
        stop=stop > 0,
        num_tokens=0.0 if num_tokens is None else next(rest),
        hook_tables=[list(itertools.islice(rest, table.numel())) for table in hook_tables],
    )


def _names(reports: dict[str, torch.Tensor], model: DataParallel) -> list[str]:
    """Names of the losses in the order in which they are sent; other stages get them from the last pipeline stage."""
    if model.mesh.pp.size == 1:
        return list(reports)
    mode = "training" if model.training else "evaluation"
    if not model.loss_names.get(mode):
        everyone = gather_objects(list(reports), model.mesh.pp)
        model.loss_names[mode] = next((names for names in everyone if names), [])
    return model.loss_names[mode]


def total_loss(losses: Mapping[str, float]) -> float:
    """The sum of the reports that are losses, whose names end so; others are figures, such as a share of pairs."""
    return sum(value for name, value in losses.items() if name.endswith("loss"))


def mark_losses(losses: dict[str, float]) -> None:
    """Record the losses of a step in the trace, if there is one."""
    if trace.recording():
        now = time.monotonic()
        trace.emit("losses", "mark", now, now, note=", ".join(f"{name} {value:.6E}" for name, value in losses.items()))


def check_finite(losses: dict[str, float], reports: dict[str, torch.Tensor], mesh: Mesh) -> None:
    """Raise on every rank when a loss is not finite, naming the ranks whose own sum is not.

    Raises:
        BadStep: nothing was updated.
    """
    bad = [name for name, value in losses.items() if not math.isfinite(value)]
    if not bad:
        return
    sums = [pair[0] for pair in reports.values()] or [torch.zeros((), device=mesh.device)]
    finite = torch.stack(sums).isfinite().all()
    flags = all_gather((~finite).to(torch.uint8).reshape(1), mesh.world).tolist()
    ranks = [str(rank) for rank, flag in zip(mesh.world.ranks, flags, strict=True) if flag]
    raise BadStep(
        f"{' and '.join(bad)} is {losses[bad[0]]}; nothing has moved",
        where=f"rank {', '.join(ranks)}" if ranks else "no rank alone: the sum of finite losses overflowed",
        fix="look at that rank's batch, or lower the rate; --no-check-for-nan-in-loss-and-grad skips such steps",
    )
