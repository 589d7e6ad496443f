"""One training step: microbatches in, one set of new weights out, the same on every rank.

The problem in a sentence: a batch of B sequences is cut into microbatches and over data-parallel ranks, each part
counts another number of tokens, and the weights after the step must not depend on how it was cut.

So every part contributes *sums*, and one division comes at the end. With l_i the loss of token i and m_i its mask:

    each microbatch       L = sum_i m_i l_i,   n = sum_i m_i          backward on L, not on L / n
    all of them           g = sum dL/dw        over microbatches, dp, cp       (parallel/data/{ddp,finalize})
    once                  g / N,   N = sum n                                   (parallel/data/finalize)
    reported              sum L / N

A mean of the ranks' means is another number as soon as their counts differ, and a rank whose tokens are all masked
would divide 0 by 0; here it contributes 0 to both sums. Where no token of any rank counts, `train_step` raises
`BadStep`.

| messages, besides DDP's buckets     | axis    | bytes                             |
|-------------------------------------|---------|-----------------------------------|
| token count (finalize)              | `dp_cp`, `pp` | 8                           |
| names of the losses                 | `pp`    | a few, at the first step          |
| loss sums and requests to stop      | `world` | 8 * (2 per loss + 1), one message |
| norm, zeros, non-finite (optimizer) | `world` | 24                                |

Skip, stop and raise follow from numbers that every rank received in the same message. The sum over `world` counts each
loss t times, in numerator and denominator alike, and a NaN of one rank reaches all.

Features of the model, such as experts and FP8, act through hooks (`layers/step_hooks`). `get_forward_backward_func`
chooses who runs the passes: `forward_backward` below, or the pipeline's schedule (`training/pipelined`).

Megatron-LM: `train_step` in `megatron/training/training.py`, `forward_backward_no_pipelining` in
`megatron/core/pipeline_parallel/schedules.py`, `loss_func` in `pretrain_gpt.py`: a loss written for it works here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minimegatron import trace
from minimegatron.errors import BadStep
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.chunks import ModelChunks
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.schedule import OptimizerParamScheduler
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.training import pipelined
from minimegatron.training.reports import StepReport, Sums, check_finite, mark_losses, reduce_reports

if TYPE_CHECKING:
    from minimegatron.data.gpt_dataset import Batch

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # sum, count, {name: [sum, count]}
LossFunc = Callable[[torch.Tensor], Loss]
ForwardStep = Callable[["Iterator[Batch]", Any], tuple[torch.Tensor, LossFunc]]
ForwardBackward = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]  # arguments of `forward_backward`
OF_EVERY_BATCH = ("tokens", "position_ids", "labels", "loss_mask", "pair_mask")


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Loss:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [b, s] in fp32, 1 where the token counts.
        output_tensor: [b, s], loss of every token.

    Returns:
        The sum; how many tokens counted; and the report, name -> [sum, count] (averaged over the whole batch).
    """
    counted = output_tensor.masked_fill(loss_mask == 0, 0.0)  # a masked token may have any label
    loss = (counted * loss_mask).sum()
    num_tokens = loss_mask.sum(dtype=torch.float64)  # fp32 skips integers above 2^24
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens])}


def pair_loss_func(loss_mask: torch.Tensor, pair_mask: torch.Tensor, output_tensor: torch.Tensor) -> Loss:
    """`loss_func` of hidden words and of pairs of texts (BERT); words alone are counted (`data/bert_dataset`).

    `pair_mask` [b, s] has the weight of a pair's loss where that stands, else 0. "sop loss" is Megatron's name.
    """
    words, num_tokens, report = loss_func(loss_mask, output_tensor)
    pairs, _, of_pairs = loss_func(pair_mask, output_tensor)
    return words + pairs, num_tokens, report | {"sop loss": of_pairs["lm loss"]}


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
    """Run the model on the next microbatch; returns the loss of every token, and the function that sums it.

    What a batch has beside tokens, positions, labels and masks of losses the model is given by name.
    """
    batch = next(data_iterator)
    more = {name: tensor for name, tensor in batch.items() if name not in OF_EVERY_BATCH}
    output = model(batch["tokens"], batch.get("position_ids"), batch["labels"], **more)
    if "pair_mask" in batch:
        return output, partial(pair_loss_func, batch["loss_mask"], batch["pair_mask"])
    return output, partial(loss_func, batch["loss_mask"])


def forward_backward(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: DataParallel,
    num_microbatches: int,
    scale: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Accumulate the gradients of all microbatches of this rank, one after the other.

    Args:
        forward_step: the model and its loss.
        data_iterator: yields microbatches.
        model: accumulates gradients, and reduces them during the last backward pass.
        num_microbatches: how many.
        scale: applied to the summed loss before `backward`.

    Returns:
        This rank's token count and reports, name -> [sum, count], in fp64.
    """
    sums = Sums(model.mesh.device)
    for index in range(num_microbatches):
        last = index == num_microbatches - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with trace.span("forward", note=str(index)):
                output, summed = forward_step(data_iterator, model)
                loss, num_tokens, report = summed(output)
            with trace.span("backward", note=str(index)), model.backward_pass():
                scale(loss).backward()
        sums.add(num_tokens, report)
    return sums.tokens, sums.reports


def get_forward_backward_func(model: DataParallel) -> ForwardBackward:
    """The function that runs the passes of a step: the loop above, or the schedule for a model in pipeline stages."""
    return pipelined.forward_backward if isinstance(model.module, ModelChunks) else forward_backward


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        batch_size: the global batch size, which the scheduler counts.
        loss_divisor: the loss is divided by it before the backward pass and gradients are multiplied by it afterwards,
            against overflow (`optim/scaler`).
        asks_to_stop: this rank wants the run to end after this step.
        forward_backward_func: runs the passes, e.g. a recorded graph; default `get_forward_backward_func(model)`.
        before_update: called with the losses before the optimizer's update; may raise `BadStep` to prevent it.
        counts_per_token: how many of the loss's count a token is (`training/task`); 1 for a loss that counts tokens.
    """

    batch_size: int = 1
    loss_divisor: float = 1.0
    asks_to_stop: bool = False
    forward_backward_func: ForwardBackward | None = None
    before_update: Callable[[dict[str, float]], None] = lambda losses: None
    counts_per_token: float = 1.0


def train_step(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: DataParallel,
    optimizer: MixedPrecisionOptimizer,
    scheduler: OptimizerParamScheduler,
    num_microbatches: int,
    options: StepOptions = StepOptions(),
) -> StepReport:
    """Forward, backward, reduce, step.

    Args:
        forward_step: the model and its loss.
        data_iterator: yields this rank's microbatches.
        model, optimizer, scheduler: are updated; the scheduler only if the weights are.
        num_microbatches: number of this rank's microbatches.
        options: see `StepOptions`.

    Returns:
        The report; equal on all ranks.

    Raises:
        BadStep: on all ranks, when no label of any rank counts, when the loss or a gradient is not finite and the
            configuration does not skip such steps, or `options.before_update` refuses the losses. Nothing was updated.
    """
    hooks, divisor = StepHooks(model, model.mesh), options.loss_divisor
    forward_backward_func = options.forward_backward_func or get_forward_backward_func(model)

    model.zero_grad_buffer()
    with hooks.passes(optimizer.loss_scale / divisor * options.counts_per_token):  # factor of a token's loss
        tokens, reports = forward_backward_func(
            forward_step, data_iterator, model, num_microbatches, lambda loss: optimizer.scale_loss(loss / divisor)
        )
    num_tokens = finalize_model_grads(model, model.mesh, tokens)  # sum over ranks, divide once
    if divisor != 1.0:
        model.scale_gradients(divisor)

    reports |= hooks.reports()
    totals = reduce_reports(
        reports, model, num_tokens=num_tokens, hook_tables=hooks.tables(), asks_to_stop=options.asks_to_stop
    )
    mark_losses(totals.losses)  # in the trace, if one is recorded
    if totals.num_tokens == 0:
        raise BadStep(
            "all labels of this batch are masked: there is no loss to lower, and nothing has moved",
            fix="look at what masks them (--eod-mask-loss, padding, a mask of your own); --bad-step skip goes on "
            "without such a batch",
        )
    if optimizer.config.check_for_nan_in_loss_and_grad:
        check_finite(totals.losses, reports, model.mesh)
    options.before_update(totals.losses)

    result = optimizer.step()
    hooks.end_step()
    if result.successful:
        scheduler.step(options.batch_size)
    return StepReport(
        losses=totals.losses,
        num_tokens=int(totals.num_tokens),
        grad_norm=result.grad_norm,
        learning_rate=scheduler.lr,
        loss_scale=result.loss_scale,
        skipped=not result.successful,
        num_zeros=result.num_zeros,
        stop=totals.stop,
        **hooks.report_fields(totals.hook_tables),
    )
