"""One training step: microbatches in, one set of new weights out, the same on every rank.

The problem in a sentence: a batch of B sequences is cut into microbatches and over data-parallel ranks, each part
counts another number of tokens, and the weights after the step must not depend on how it was cut.

They do not if every part contributes *sums* and somebody divides *once*. With l_i the loss of token i and m_i its mask:

    each microbatch       L = sum_i m_i l_i,   n = sum_i m_i          backward on L, not on L / n
    all of them           g = sum dL/dw        over microbatches, dp, cp       (parallel/ddp, parallel/finalize)
    once                  g / N,   N = sum n                                   (parallel/finalize)
    reported              sum L / N

The mean of per-rank means is a different number as soon as the counts differ, and a rank whose tokens are all masked
would divide 0 by 0; here it contributes 0 to both sums.

| what travels, besides DDP's buckets | axis    | bytes                             |
|-------------------------------------|---------|-----------------------------------|
| token count (finalize)              | `dp_cp` | 8; in a pipeline over `pp` too    |
| names of the losses                 | `pp`    | a few, at a pipeline's first step |
| loss sums and requests to stop      | `world` | 8 * (2 per loss + 1), one message |
| norm, zeros, non-finite (optimizer) | `world` | 24                                |
| FP8 magnitudes, delayed scaling     | `tp_dp_cp` | 4 a tensor, one message        |

**Deciding together.** Skip, stop and raise are decided from numbers that every rank has received in the same message;
no rank decides from what it alone has seen. tp ranks hold copies of the loss and add them all: the sum and the count
are both t times too large, the mean is the same, and a NaN that one rank alone sees is everybody's NaN.

**fp16.** A sum over 8192 tokens is 8192 times a mean, and so are its gradients: with the loss scale that suits a mean
they overflow 65504, and with a smaller one the scaler spends its first thirty steps searching. So the sum is divided by
`loss_unit`, a power of two near the tokens of a microbatch, before the backward pass, and the finished fp32 buffer is
multiplied by it. Only exponents change; where nothing over- or underflows the result is bit for bit the same, so bf16
and fp32, which have the range, do without (unit 1).

Megatron-LM: `train_step` in `megatron/training/training.py`, `forward_backward_no_pipelining` in
`megatron/core/pipeline_parallel/schedules.py`, `loss_func` in `pretrain_gpt.py`: the same contract, so that a loss
written for Megatron works here.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.data.masking import Batch
from minimegatron.layers.fp8_model import keeping_weights, move_scales
from minimegatron.layers.router import set_loss_scale
from minimegatron.models.chunks import ModelChunks
from minimegatron.models.mtp import depth_losses
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.schedule import OptimizerParamScheduler
from minimegatron.parallel.balance import move_biases
from minimegatron.parallel.ddp import DistributedDataParallel
from minimegatron.parallel.finalize import finalize_model_grads
from minimegatron.training import pipelined
from minimegatron.training.metrics import StepReport
from minimegatron.training.reports import check_finite, reduce_reports

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # sum, count, {name: [sum, count]}
LossFunc = Callable[[torch.Tensor], Loss]
ForwardStep = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, LossFunc]]


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Loss:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [b, s] in fp32, 1 where the token counts.
        output_tensor: [b, s], loss of every token.

    Returns:
        The sum; how many tokens counted; and what to report, name -> [sum, count] (averaged over the whole batch).
    """
    counted = output_tensor.masked_fill(loss_mask == 0, 0.0)  # the label of a token that does not count may be no word
    loss = (counted * loss_mask).sum()
    num_tokens = loss_mask.sum(dtype=torch.float64)  # fp32 knows no odd number above 2^24
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens])}


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
    """Run the model on the next microbatch: the loss of every token, and the function that sums it."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch.get("position_ids"), batch["labels"], document_ids=batch.get("document_ids"))
    return output, partial(loss_func, batch["loss_mask"])


def loss_unit(dtype: torch.dtype, tokens: int) -> float:
    """What the loss is divided by before the backward pass (see the module docstring): a power of 2 in fp16, else 1."""
    return 2.0 ** round(math.log2(tokens)) if dtype == torch.float16 else 1.0


def forward_backward(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: DistributedDataParallel,
    num_microbatches: int,
    scale: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Accumulate the gradients of all microbatches of this rank: one after the other, or through a pipeline.

    Args:
        forward_step: the model and its loss.
        data_iterator: yields microbatches.
        model: gradients go to its buffer, and travel during the last backward pass.
        num_microbatches: how many.
        scale: applied to the summed loss before `backward`.

    Returns:
        This rank's token count and reports, name -> [sum, count], in fp64; on the stages of a pipeline before the last
        one 0 and {}.
    """
    if isinstance(model.module, ModelChunks):
        return pipelined.forward_backward(forward_step, data_iterator, model, num_microbatches, scale)
    tokens = torch.zeros((), dtype=torch.float64, device=model.mesh.device)
    reports: dict[str, torch.Tensor] = {}
    for index in range(num_microbatches):
        last = index == num_microbatches - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with trace.span("forward", note=str(index)):
                output, summed = forward_step(data_iterator, model)
                loss, num_tokens, report = summed(output)
            with trace.span("backward", note=str(index)):
                scale(loss).backward()
        tokens += num_tokens.detach()
        for name, pair in report.items():
            reports[name] = reports.get(name, 0.0) + pair.detach().double()
    return tokens, reports


def train_step(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: DistributedDataParallel,
    optimizer: MixedPrecisionOptimizer,
    scheduler: OptimizerParamScheduler,
    mesh: Mesh,
    *,
    num_microbatches: int,
    increment: int = 1,
    unit: float = 1.0,
    asks_to_stop: bool = False,
    passes: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]] = forward_backward,
) -> tuple[StepReport, bool]:
    """Forward, backward, reduce, step.

    Args:
        forward_step: the model and its loss.
        data_iterator: yields this rank's microbatches.
        model, optimizer, scheduler: what is trained; the scheduler moves only when the weights do.
        mesh: the layout.
        num_microbatches: of this rank.
        increment: what the scheduler counts, e.g. the global batch size.
        unit: see `loss_unit`.
        asks_to_stop: this rank wants the run to end after this step.
        passes: what accumulates the gradients; a recorded step (`training/graphs.py`) in its place.

    Returns:
        What happened, and whether the run should end; equal on all ranks.

    Raises:
        NumericsError: on all ranks, when the loss or a gradient is not finite and the configuration does not skip such
            steps. Nothing has moved.
    """
    model.zero_grad_buffer()
    scale = optimizer.loss_scale / unit
    set_loss_scale(model, scale)
    with keeping_weights(model):
        tokens, reports = passes(
            forward_step, data_iterator, model, num_microbatches, lambda loss: optimizer.scale_loss(loss / unit)
        )
    num_tokens = finalize_model_grads(model, mesh, tokens)
    if unit != 1.0:
        model.scale_gradients(unit)
    reports, load = reports | depth_losses(model, scale), model.expert_load
    beside = [num_tokens] if load is None else [num_tokens, load.table]
    losses, stop, [[counted], *loads] = reduce_reports(
        reports, mesh, asks_to_stop, names=model.loss_names[True], beside=beside
    )
    if trace.recording():
        now = time.monotonic()
        trace.emit("losses", "mark", now, now, note=", ".join(f"{name} {value:.6E}" for name, value in losses.items()))
    if optimizer.config.check_for_nan_in_loss_and_grad:
        check_finite(losses, reports, mesh)
    result = optimizer.step()
    move_scales(model, mesh)
    if load is not None:
        move_biases(model, load)
    if result.successful:
        scheduler.step(increment)
    report = StepReport(
        losses,
        num_tokens=int(counted),
        grad_norm=result.grad_norm,
        learning_rate=scheduler.lr,
        loss_scale=result.loss_scale,
        skipped=not result.successful,
        num_zeros=result.num_zeros,
        experts=tuple(load.rows(loads[0])) if load is not None else (),
    )
    return report, stop
