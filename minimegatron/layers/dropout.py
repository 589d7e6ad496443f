"""Dropout from the right random stream of a rank.

tp ranks that hold the *same* activation must drop the *same* elements, and ranks that hold different heads or different
tokens must not:

| dropout on                             | with sequence parallelism | stream             | over tp   |
|----------------------------------------|---------------------------|--------------------|-----------|
| residual branches, embedding           | no                        | default            | equal     |
| residual branches, embedding           | yes: other tokens         | model-parallel-rng | different |
| attention weights: other heads         | either                    | model-parallel-rng | different |

With one stream for both, either the replicated activations drift apart, or every rank drops the same pattern; neither
stops the training. Megatron-LM: `CudaRNGStatesTracker` in `megatron/core/tensor_parallel/random.py`.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.random import MODEL_PARALLEL, RngStreams


class Dropout(nn.Module):
    """Dropout with probability `p` from the right stream of `rng`.

    Args:
        p: probability that an element is dropped.
        rng: this rank's streams; needed only if p > 0.
        different_over_tp: whether the ranks of tp hold different elements, and must not drop alike.
    """

    def __init__(self, p: float, rng: RngStreams | None, different_over_tp: bool = False) -> None:
        super().__init__()
        self.p = p
        self.rng = rng
        self.different_over_tp = different_over_tp

    def stream(self) -> contextlib.AbstractContextManager:
        """In the block, draw from the stream that differs over tp, or from the default one."""
        if not (self.training and self.p > 0.0 and self.different_over_tp and self.rng is not None):
            return contextlib.nullcontext()
        return self.rng.fork(MODEL_PARALLEL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of `x`; nothing happens in eval mode."""
        if not self.training or self.p == 0.0:
            return x
        with self.stream():
            return F.dropout(x, self.p, True)
