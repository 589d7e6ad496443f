"""The forward and backward passes of a whole step as one CUDA graph.

Python needs longer to launch a small model's kernels than the GPU to run them. A graph is a recording of the kernels of
one step with the addresses they read and write (`cuda_graphs.py`); replaying it costs one launch. So nothing may depend
on what the host decides between two kernels, and every tensor keeps its address: batches are copied into the memory of
the recorded ones before each replay.

| in the graph                                            | outside                                                 |
|---------------------------------------------------------|---------------------------------------------------------|
| all microbatches: forward, loss, backward, accumulation | reading data, zeroing, sums over dp, the optimizer, logs |

`rules.check_run` refuses what a recording cannot have: messages inside the passes (tp, cp, pp, ep; buckets that travel
during backward), generators (dropout), counts that the host must know (experts, documents), a loss scale that changes
(fp16), batches that grow, recompute (it saves the state of generators).

`--cuda-graph-impl local --cuda-graph-scope full_iteration`; `--enable-cuda-graph` is the same. Graphs of single layers,
and Transformer Engine's, are not here.

Megatron-LM: `megatron/core/full_cuda_graph.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.config.run import RunConfig
from minimegatron.cuda_graphs import CudaRecorder, Recorded, Recorder
from minimegatron.data.gpt_dataset import Batch
from minimegatron.errors import ConfigError, DataError
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.step import ForwardStep, forward_backward

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


class StepGraph:
    """`training.step.forward_backward`, recorded once and replayed for every later step.

    Args:
        warmup: steps before the recording.
        recorder: records and replays.
    """

    def __init__(self, warmup: int, recorder: Recorder) -> None:
        self._recorded: Recorded[Result] = Recorded(warmup, recorder)
        self._batches: list[Batch] = []

    def __call__(
        self,
        forward_step: ForwardStep,
        data_iterator: Iterator[Batch],
        model: DataParallel,
        num_microbatches: int,
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> Result:
        """See `training.step.forward_backward`.

        Raises:
            DataError: the batches are not like those of the first step.
        """
        self._take([next(data_iterator) for _ in range(num_microbatches)])

        def run() -> Result:
            return forward_backward(forward_step, iter(self._batches), model, num_microbatches, scale)

        tokens, reports = self._recorded(run)
        return tokens.clone(), {name: pair.clone() for name, pair in reports.items()}

    def _take(self, batches: list[Batch]) -> None:
        """Copy the batches into the memory that the recording reads."""
        if not self._batches:
            self._batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
            return
        recorded, new = _shapes(self._batches), _shapes(batches)
        if recorded != new:
            raise DataError(
                f"a step was recorded as a CUDA graph with batches of {recorded[:2]}, and now there are {new[:2]}",
                fix="batches of one shape, or --cuda-graph-impl none",
            )
        for places, batch in zip(self._batches, batches, strict=True):
            for name, tensor in batch.items():
                places[name].copy_(tensor)


def _shapes(batches: list[Batch]) -> list[dict[str, tuple[Any, ...]]]:
    return [{name: (*tensor.shape, str(tensor.dtype)) for name, tensor in batch.items()} for batch in batches]


def step_graph(run: RunConfig, device: torch.device) -> StepGraph | None:
    """The graph that the configuration asks for, or None.

    Raises:
        ConfigError: there is no GPU.
    """
    if run.training.cuda_graph_impl == "none":
        return None
    if device.type != "cuda":
        raise ConfigError(
            f"cuda_graph_impl {run.training.cuda_graph_impl} on a {device.type}: a CUDA graph is a recording of "
            "launches on a GPU",
            fix="--cuda-graph-impl none, or a GPU",
        )
    return StepGraph(run.training.cuda_graph_warmup_steps, CudaRecorder(device))
