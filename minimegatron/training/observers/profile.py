"""Profiles a window of steps: a whole run is too large to open, and its first steps allocate and compile.

`--profile` opens a window after `--profile-step-start` steps and closes it after `--profile-step-end` of them, on the
ranks of `--profile-ranks`. Files go to `--profile-dir`:

| flags                              | what                                                         | where       |
|------------------------------------|--------------------------------------------------------------|-------------|
| `--profile`                        | a timeline of passes and communications a rank; NVTX ranges, | CPU and GPU |
|                                    | and the range of `nsys -c cudaProfilerApi`, on a GPU         |             |
| `--profile --use-pytorch-profiler` | the timeline, and torch's profiler: a Chrome trace a rank    | CPU and GPU |

`minimegatron trace FOLDER` makes of all files one trace with one clock, for Perfetto (`viz/merged_trace`). torch's
files can be opened there as they are. Operators are named by torch; `forward`, `optimizer_step` and the like are the
spans of `minimegatron/trace.py`, which become ranges while the window is open. Communications are those of the flight
recorder, whose buffer grows meanwhile.

Megatron-LM: `train` in `megatron/training/training.py`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from minimegatron import trace
from minimegatron.comm import flight_recorder
from minimegatron.config import TrainingConfig
from minimegatron.errors import ConfigError
from minimegatron.launch import flight_dump, rank
from minimegatron.training.observers import Observer, Step
from minimegatron.viz import merged_trace

CALLS = 200_000  # communications of a window


class Profile(Observer):
    """Profiles a window of steps. Does nothing without `--profile`, or on other ranks.

    Args:
        training: the steps, the ranks and the profiler.
        number: this rank.
        device: its device.
        say: prints a line.

    Raises:
        ConfigError: a folder that cannot be made.
    """

    def __init__(
        self, training: TrainingConfig, number: int, device: torch.device, say: Callable[[str], None] = print
    ) -> None:
        self.training = training
        self.rank = number
        self.device = device
        self.say = say
        self.wanted = training.profile and number in training.profile_ranks
        self._open: contextlib.ExitStack | None = None
        if self.wanted:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--profile-dir {training.profile_dir}: {error}", fix="a folder to write to"
                ) from error

    @property
    def path(self) -> Path:
        """torch's Chrome trace of this rank."""
        steps = f"{self.training.profile_step_start}-{self.training.profile_step_end}"
        return Path(self.training.profile_dir) / f"rank{self.rank}_steps{steps}.json"

    @property
    def timeline_path(self) -> Path:
        """The timeline of this rank."""
        return self.path.with_suffix(".timeline.json")

    def before_step(self, done: int) -> None:
        """Open the window after `--profile-step-start` steps."""
        if self.wanted and self._open is None and done == self.training.profile_step_start:
            self._open = contextlib.ExitStack()
            self._timeline(self._open)
            if self.training.use_pytorch_profiler:
                self._torch(self._open)
            elif self.device.type == "cuda":
                self._nvtx(self._open)

    def after_step(self, step: Step) -> None:
        """Close the window after its last step."""
        if step.iteration >= self.training.profile_step_end:
            self.close()

    def close(self) -> None:
        """Close the window if it is open, and write the trace."""
        if self._open is not None:
            window, self._open, self.wanted = self._open, None, False
            window.close()

    def _timeline(self, window: contextlib.ExitStack) -> None:
        """Record the spans, and keep all communications of the window."""
        recorder, begin = flight_recorder.running(), time.time_ns()
        if recorder is not None:
            window.enter_context(recorder.keeping(CALLS))
        log = window.enter_context(trace.record(self.rank))

        def write() -> None:
            calls = [] if recorder is None else flight_dump.calls_since(recorder, self.rank, begin)
            to_wall = time.time_ns() - time.monotonic_ns()
            offset = rank.clock_offset_ns()
            line = merged_trace.timeline(self.rank, socket.gethostname(), log.events, calls, to_wall, offset)
            self.timeline_path.write_text(json.dumps(line))
            if self.training.use_pytorch_profiler:
                return
            self.say(f"timeline of rank {self.rank}: {self.timeline_path} (minimegatron trace {self.path.parent})")

        window.callback(write)

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
