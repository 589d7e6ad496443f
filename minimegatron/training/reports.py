"""What a step tells its host: losses summed over all ranks, in one message and one read of the device.

The problem in a sentence: whenever the host reads a number, it waits until the GPU has done all that was asked of it,
and the GPU then waits until the host has asked for more; a step that reads four numbers one after the other is idle
four times.

So counts and sums stay on the device until the step needs them to decide, and then come together:

    [ sum, count of each loss ..., asks to stop ]      summed over `world`; in a pipeline also: has new names
    [ token count, loads of experts ... ]              known by then, read along

| the host waits                                          | how often               |
|---------------------------------------------------------|-------------------------|
| here                                                    | once a step, evaluation |
| for norm, zeros, non-finite tensors (`optim/optimizer`) | once a step             |
| for the counts of experts (`layers/moe/dispatch`)           | once a layer and pass   |
| for the borders of documents (`layers/attention/mask`)            | once a microbatch       |

**Names.** Only the last stage of a pipeline has losses, and every rank must send as many numbers as it does. It says
their names once, in a message of their own, and they stay what they are. Should it ever have others, the number
`has new names` tells all ranks, and all of them ask again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minimegatron import trace
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import BadStep

if TYPE_CHECKING:
    from minimegatron.layers.moe.balance import LayerLoad
    from minimegatron.optim.optimizer import StepResult


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one training step did, the same on every rank.

    Attributes:
        losses: name -> mean over the counted tokens of the whole batch.
        num_tokens: tokens that counted, over all ranks.
        grad_norm: global gradient norm before clipping; None when it was not computed.
        learning_rate: what the schedule says after this step, as Megatron logs it.
        loss_scale: of this step; 1 without loss scaling.
        skipped: the optimizer did not move (fp16 overflow).
        num_zeros: zeros in the gradient, when counted.
        experts: what the router of each layer with experts did.
    """

    losses: dict[str, float]
    num_tokens: int
    grad_norm: float | None
    learning_rate: float
    loss_scale: float = 1.0
    skipped: bool = False
    num_zeros: int | None = None
    experts: tuple[LayerLoad, ...] = ()

    @classmethod
    def of(
        cls, result: StepResult, losses: dict[str, float], num_tokens: int, learning_rate: float, **more: Any
    ) -> StepReport:
        """From what the optimizer says of the step; `more` are the fields that hooks fill (`layers/step_hooks.py`)."""
        return cls(
            losses,
            num_tokens,
            result.grad_norm,
            learning_rate,
            loss_scale=result.loss_scale,
            skipped=not result.successful,
            num_zeros=result.num_zeros,
            **more,
        )

    def decided(self) -> dict[str, float]:
        """By which numbers each rank has moved its own part of the weights; equal on all ranks, or the parts differ."""
        norm = math.nan if self.grad_norm is None else self.grad_norm
        return {"gradient norm": norm, "learning rate": self.learning_rate, "loss scale": self.loss_scale}


class Totals(NamedTuple):
    """What `reduce_reports` has read; equal on all ranks.

    Attributes:
        means: name -> mean over all counted tokens; `of_nothing` where none counted.
        stop: whether any rank asked to stop.
        beside: the tensors that were read along, as flat lists.
    """

    means: dict[str, float]
    stop: bool
    beside: list[list[float]]


def reduce_reports(
    reports: dict[str, torch.Tensor],
    mesh: Mesh,
    asks_to_stop: bool = False,
    *,
    names: list[str] | None = None,
    beside: Sequence[torch.Tensor] = (),
    of_nothing: float | None = 0.0,
) -> Totals:
    """Add up [sum, count] pairs over the world, in one message, and read them; waits for the device, once.

    Args:
        reports: name -> [sum, count] of this rank, fp64; the same names on all ranks, or none on pipeline stages
            before the last.
        mesh: the layout.
        asks_to_stop: this rank wants the run to end (a signal, the time is up).
        names: of the losses, as an earlier call has left them there; empty at first. For pipelines.
        beside: more fp64 tensors, equal on all ranks, to be read along.
        of_nothing: the mean of no token; None leaves it out.
    """
    names = [] if names is None else names
    if mesh.pp.size == 1:
        names[:] = reports
    elif not names:
        names[:] = next((found for found in gather_objects(list(reports), mesh.pp) if found), [])
    flags = [asks_to_stop] if mesh.pp.size == 1 else [asks_to_stop, bool(reports) and list(reports) != names]
    zero = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    pairs = [reports.get(name, zero).double() for name in names]
    # made by the device: for a number of the host's it would be waited for
    raised = [torch.full((1,), float(flag), dtype=torch.float64, device=mesh.device) for flag in flags]
    sums = all_reduce(torch.cat(pairs + raised), mesh.world)
    flat = torch.cat([sums, *(tensor.double().flatten() for tensor in beside)]).tolist()
    numbers, (stops, *strange), rest = flat[: 2 * len(names)], flat[2 * len(names) : len(sums)], iter(flat[len(sums) :])
    if any(strange):
        names.clear()
        return reduce_reports(reports, mesh, asks_to_stop, names=names, beside=beside, of_nothing=of_nothing)
    pairs_read = zip(names, numbers[::2], numbers[1::2], strict=True)
    found = {name: total / count if count else of_nothing for name, total, count in pairs_read}
    means = {name: mean for name, mean in found.items() if mean is not None}
    return Totals(means, stops > 0, [[next(rest) for _ in range(tensor.numel())] for tensor in beside])


def mark_losses(losses: dict[str, float]) -> None:
    """Put the losses of a step into the trace, where one is recorded."""
    if trace.recording():
        now = time.monotonic()
        trace.emit("losses", "mark", now, now, note=", ".join(f"{name} {value:.6E}" for name, value in losses.items()))


def check_finite(losses: dict[str, float], reports: dict[str, torch.Tensor], mesh: Mesh) -> None:
    """Raise on every rank when a loss is not finite, naming the ranks whose own sum is not.

    Raises:
        BadStep: nothing has moved yet.
    """
    bad = [name for name, value in losses.items() if not math.isfinite(value)]
    if not bad:
        return
    mine = torch.stack([pair[0] for pair in reports.values()] or [torch.zeros((), device=mesh.device)]).isfinite().all()
    flags = all_gather((~mine).to(torch.uint8).reshape(1), mesh.world).tolist()
    ranks = [str(rank) for rank, flag in zip(mesh.world.ranks, flags, strict=True) if flag]
    raise BadStep(
        f"{' and '.join(bad)} is {losses[bad[0]]}; nothing has moved",
        where=f"rank {', '.join(ranks)}" if ranks else "no rank alone: the sum of finite losses overflowed",
        fix="look at that rank's batch, or lower the rate; --no-check-for-nan-in-loss-and-grad skips such steps",
    )
