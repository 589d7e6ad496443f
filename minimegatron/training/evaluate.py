"""Loss and perplexity on text that is not trained on, without a trace in the training.

The problem in a sentence: an evaluation that draws one random number, leaves dropout off, or moves the training data by
one sample changes every step after it, and the run can no longer be repeated.

So it has a data iterator of its own, draws nothing (dropout is off in eval mode), computes no gradient, and puts every
module back into the mode it was in. The mean is over tokens, not over batches:

    loss = sum over batches, dp, cp of sum_i m_i l_i  /  sum of m_i          perplexity = exp(loss)

One message of 8 * (2 per loss + 1) bytes over the world, at the end.

Megatron-LM: `evaluate` in `megatron/training/training.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.data.masking import Batch
from minimegatron.models.chunks import ModelChunks
from minimegatron.parallel.data_parallel import DataParallel
from minimegatron.training.pipelined import forward_only
from minimegatron.training.reports import reduce_reports
from minimegatron.training.step import ForwardStep


@torch.no_grad()
def evaluate(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: DataParallel,
    mesh: Mesh,
    num_microbatches: int,
) -> dict[str, float]:
    """Mean losses over `num_microbatches` of every rank; all ranks must call.

    Args:
        forward_step: as in training.
        data_iterator: yields this rank's microbatches of the evaluated split.
        model: is in eval mode meanwhile.
        mesh: the layout.
        num_microbatches: forward passes of each rank.

    Returns:
        name -> mean over all counted tokens, equal on all ranks; without those of no token.
    """
    reports: dict[str, torch.Tensor] = {}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        if isinstance(model.module, ModelChunks):
            reports = forward_only(forward_step, data_iterator, model, num_microbatches)
        else:
            for _ in range(num_microbatches):
                output, summed = forward_step(data_iterator, model)
                for name, pair in summed(output)[2].items():
                    reports[name] = reports.get(name, 0.0) + pair.double()
    finally:
        for module, mode in modes.items():
            module.training = mode
    return reduce_reports(reports, mesh, names=model.loss_names[False], of_nothing=None).means
