"""A task: from what a run learns, and by which loss. Pre-training is the default one; `posttraining` has the others.

The trainer, the optimizer, the layouts and the checkpoints are the same for every task. A task says six things:

| question                                         | method         | pre-training                                  |
|--------------------------------------------------|----------------|-----------------------------------------------|
| which samples are there?                         | `load_data`    | text of `--data-path`                         |
| which loss has a microbatch?                     | `forward_step` | cross entropy of the tokens that count        |
| what do its passes need from elsewhere?          | `prepare`      | nothing                                       |
| what happens beside the steps?                   | `begin`        | nothing                                       |
| what is an evaluation, and which is the best?    | `evaluate`,    | the loss of held-out text; the lowest         |
|                                                  | `score`        |                                               |
| what must a resumed run have beside the model?   | `tensors`      | nothing: the order of samples is a function   |

A loss is a sum and a count, as `training/step` explains: of tokens, of pairs of answers, or of sequences. The sums of
all microbatches and ranks are added, and divided once by the sum of the counts, so no task divides by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from minimegatron.checkpoint.regions import Logical
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch
from minimegatron.training import datasets, step
from minimegatron.training.datasets import Joint, RunData
from minimegatron.training.observers import Observer
from minimegatron.training.reports import total_loss
from minimegatron.training.step import LossFunc

if TYPE_CHECKING:
    from minimegatron.training.run_state import RunState


class Task:
    """Pre-training; the tasks of `posttraining` override what differs.

    Args:
        run: the configuration; its section `task` is the task's own.

    Attributes:
        counts_per_token: how many of the loss's count a token of a sample is, on average. Penalties of routers enter
            the loss by their tokens (`layers/moe/router`), so a loss that counts sequences multiplies them by it.
    """

    counts_per_token = 1.0

    def __init__(self, run: RunConfig) -> None:
        self.run = run

    def load_data(
        self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
    ) -> RunData:
        """Load the tokenizer and the sets of samples; all ranks call it (`training/datasets.load_data`)."""
        return datasets.load_data(run, mesh, num_samples, joint, quiet)

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        """Run the model on the next microbatch; returns what it gives, and the function that makes a loss of it."""
        return step.forward_step(data_iterator, model)

    def prepare(self, batches: Iterator[Batch], num_microbatches: int) -> Iterator[Batch]:
        """Called before the passes of a step, or of an evaluation, on all ranks: the batches that its passes will use.

        A task whose loss needs another model's forward pass computes it here, before this model's pipeline runs.
        """
        return batches

    def evaluate(self, split: str) -> dict[str, float] | None:
        """What an evaluation of the task's own finds; None: the losses of a split's samples. All ranks call it.

        It has no effect on training: it draws from no random stream, and changes no buffer of a step.

        Args:
            split: "validation" or "test".
        """
        return None

    def score(self, found: Mapping[str, float]) -> float:
        """A number for what an evaluation has found: the checkpoint with the lowest one is the best."""
        return total_loss(found)

    def begin(self, state: RunState, data: RunData, say: Callable[[str], None]) -> Sequence[Observer]:
        """Called when model and data exist, before a checkpoint is loaded; returns observers of this task.

        They are called before all others, so that what a step reads is there when `before_step` of them has returned.
        """
        return ()

    def tensors(self) -> dict[str, torch.Tensor | Logical]:
        """What a checkpoint contains of the task; a resumed run fills it in place.

        Tensors are equal on all ranks; of a logical tensor this rank has its part.
        """
        return {}
