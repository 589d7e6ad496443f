"""Profiles a window of steps: a whole run is too large to open, and its first steps allocate and compile.

`--profile` opens a window after `--profile-step-start` steps and closes it after `--profile-step-end` of them, on the
ranks of `--profile-ranks`:

| flags                              | what                                                     | where       |
|------------------------------------|----------------------------------------------------------|-------------|
| `--profile --use-pytorch-profiler` | torch's profiler: a Chrome trace a rank in `--profile-dir` | CPU and GPU |
| `--profile`                        | NVTX ranges, and the range of `nsys -c cudaProfilerApi`  | GPU         |

Open the trace in `chrome://tracing` or Perfetto. Operators are named by torch; `forward`, `optimizer_step` and the like
are the spans of `minimegatron/trace.py`, which become ranges while the window is open.

Megatron-LM: `train` in `megatron/training/training.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from minimegatron import trace
from minimegatron.config import TrainingConfig
from minimegatron.errors import ConfigError
from minimegatron.training.observers import Observer, Step


class Profile(Observer):
    """Profiles a window of steps. Does nothing without `--profile`, or on other ranks.

    Args:
        training: the steps, the ranks and the profiler.
        rank: this rank.
        device: its device.
        say: prints a line.

    Raises:
        ConfigError: NVTX ranges on a CPU, or a folder that cannot be made.
    """

    def __init__(
        self, training: TrainingConfig, rank: int, device: torch.device, say: Callable[[str], None] = print
    ) -> None:
        self.training = training
        self.rank = rank
        self.device = device
        self.say = say
        self.wanted = training.profile and rank in training.profile_ranks
        self._open: contextlib.ExitStack | None = None
        if training.profile and not training.use_pytorch_profiler and device.type != "cuda":
            raise ConfigError(
                f"--profile without --use-pytorch-profiler marks ranges for nsys, which needs a GPU; this is a "
                f"{device.type}",
                fix="--use-pytorch-profiler",
            )
        if self.wanted and training.use_pytorch_profiler:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--profile-dir {training.profile_dir}: {error}", fix="a folder to write to"
                ) from error

    @property
    def path(self) -> Path:
        """The Chrome trace of this rank."""
        steps = f"{self.training.profile_step_start}-{self.training.profile_step_end}"
        return Path(self.training.profile_dir) / f"rank{self.rank}_steps{steps}.json"

    def before_step(self, done: int) -> None:
        """Open the window after `--profile-step-start` steps."""
        if self.wanted and self._open is None and done == self.training.profile_step_start:
            self._open = contextlib.ExitStack()
            (self._torch if self.training.use_pytorch_profiler else self._nvtx)(self._open)

    def after_step(self, step: Step) -> None:
        """Close the window after its last step."""
        if step.iteration >= self.training.profile_step_end:
            self.close()

    def close(self) -> None:
        """Close the window if it is open, and write the trace."""
        if self._open is not None:
            window, self._open, self.wanted = self._open, None, False
            window.close()

    def _torch(self, window: contextlib.ExitStack) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        window.callback(self._write, profiler)
        window.enter_context(profiler)
        window.enter_context(trace.ranges(torch.profiler.record_function))

    def _write(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.say(f"profile of rank {self.rank}: {self.path}")

    def _nvtx(self, window: contextlib.ExitStack) -> None:
        cudart = torch.cuda.cudart()
        torch.cuda.synchronize(self.device)
        torch.cuda.check_error(cudart.cudaProfilerStart())
        window.callback(lambda: torch.cuda.check_error(cudart.cudaProfilerStop()))
        window.callback(lambda: torch.cuda.synchronize(self.device))
        window.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
        window.enter_context(trace.ranges(torch.cuda.nvtx.range))
