"""Recording and replay of CUDA graphs: warmed up, recorded once, replayed any number of times.

The problem in a sentence: where kernels are shorter than the time that Python takes to launch them, the GPU waits for
Python.

A CUDA graph is a recording of kernels with the addresses that they read and write; replaying it costs one launch. A
function that is recorded therefore reads its inputs from tensors with fixed addresses, writes its results to fixed
addresses, and copies no number to the host in between:

    call 1 ... w       run as always, on a stream of their own (allocations settle, libraries choose)
    call w + 1         recorded, which computes nothing, then replayed
    later              replayed

`Recorder` is the interface to CUDA. Tests have another one, which replays by running again, refuses whatever makes a
host wait, and compares every address with those of the recording (`tests/recorder.py`).

| recorded                  | by                     |
|---------------------------|------------------------|
| the passes of a step      | `training/graphs.py`   |
| the decoding of one token | `inference/runner.py`  |

Megatron-LM: `megatron/core/full_cuda_graph.py`, `transformer/cuda_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from minimegatron.errors import ConfigError

Result = TypeVar("Result")


class Recorder(Protocol):
    """Records and replays a function of no arguments that only uses tensors at fixed addresses."""

    def warm(self, run: Callable[[], Result]) -> Result:
        """Run the function as it will be recorded, without recording."""
        ...

    def record(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """(The result, at its fixed addresses, a function that replays)."""
        ...


class CudaRecorder:
    """A recorder of CUDA graphs.

    Args:
        device: the GPU.

    Raises:
        ConfigError: it is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(
                f"a CUDA graph on a {device.type}: it is a recording of launches on a GPU", fix="no graph, or a GPU"
            )
        self._stream = torch.cuda.Stream(device)

    def warm(self, run: Callable[[], Result]) -> Result:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            result = run()
        return result, graph.replay


class Recorded(Generic[Result]):
    """A function that is warmed up, recorded, and from then on replayed.

    Args:
        warmup: calls before the recording.
        recorder: records and replays.
    """

    def __init__(self, warmup: int, recorder: Recorder) -> None:
        self._left, self._recorder = warmup, recorder
        self._played: tuple[Result, Callable[[], None]] | None = None

    def __call__(self, run: Callable[[], Result]) -> Result:
        """Do what `run` does. Once it has been recorded, `run` is not called, and the result has the recording's
        addresses.

        The next call overwrites them; clone a result to keep it.
        """
        if self._left > 0:
            self._left -= 1
            return self._recorder.warm(run)
        if self._played is None:
            self._played = self._recorder.record(run)
        result, play = self._played
        play()
        return result
