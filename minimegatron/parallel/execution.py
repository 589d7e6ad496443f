"""What the two executors of pipeline schedules share: the stage that they call, and what they check and record.

| executor              | receives                        | sent tensors                    | used by              |
|-----------------------|---------------------------------|---------------------------------|----------------------|
| `parallel/pipeline`   | when the action needs its input | kept until the end of the list  | reading, tests, labs |
| `parallel/overlapped` | posted one action ahead         | released when they have arrived | training             |

Both run any schedule with the same call, `run(schedule, stages, p2p, hidden)`, and give the same gradients. Which
messages an action needs and makes is derived from the lists (`Schedule.input_of`, `Schedule.output_of`).

A stage is anything with `forward`, `backward` and `weights`: a part of a model (`parallel/stage`), or a `sleep`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minimegatron import trace
from minimegatron.errors import ConfigError
from minimegatron.parallel.actions import Action, Schedule
from minimegatron.parallel.schedule_check import require_runnable

if TYPE_CHECKING:
    from minimegatron.comm.p2p import PointToPoint


class Stage(Protocol):
    """What an executor needs of a stage."""

    def forward(self, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """Output for the next stage (unused on the last); `x` is the output of the stage before, None on the first."""

    def backward(self, microbatch: int, dy: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient of the input (unused on the first stage); `dy` is that of the output, None on the last stage."""

    def weights(self, microbatch: int) -> None:
        """The weights' gradients that `backward` of this microbatch has left (only where the schedule has a W)."""


def _nothing(*_: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class FunctionStage:
    """A stage made of three plain functions, e.g. sleeps."""

    forward: Callable[[int, torch.Tensor | None], torch.Tensor | None]
    backward: Callable[[int, torch.Tensor | None], torch.Tensor | None] = _nothing
    weights: Callable[[int], None] = _nothing


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Shape and dtype of the messages between stages, where both sides know them beforehand."""

    shape: torch.Size
    dtype: torch.dtype


def begin(schedule: Schedule, stages: Sequence[Stage], p2p: PointToPoint | None, checked: bool) -> int:
    """Check that the schedule can run here, and open the connections; this rank's position in the pipeline.

    Raises:
        ConfigError: the sentences of `schedule_check.check`, or a schedule for another number of ranks or chunks.
    """
    ranks, rank = (p2p.pp.size, p2p.pp.rank) if p2p is not None else (1, 0)
    if schedule.p != ranks or schedule.v != len(stages):
        raise ConfigError(
            f"schedule `{schedule.name}` is for {schedule.p} ranks with {schedule.v} stages each; "
            f"here are {ranks} with {len(stages)}",
            fix="build it for this pipeline",
        )
    if not checked:
        require_runnable(schedule)
    if p2p is not None:
        p2p.connect([(a, b) for a in range(ranks) for b in range(ranks) if schedule.messages(a, b)])
    return rank


def compute(stage: Stage, action: Action, x: torch.Tensor | None) -> torch.Tensor | None:
    """Run the action on its stage, recorded as a span named F, B or W with the note `microbatch.chunk`."""
    with trace.span(action.kind, note=f"{action.microbatch}.{action.chunk}"):
        if action.kind == "F":
            return stage.forward(action.microbatch, x)
        if action.kind == "B":
            return stage.backward(action.microbatch, x)
        stage.weights(action.microbatch)
        return None


def require_output(
    schedule: Schedule, rank: int, action: Action, output: torch.Tensor | None, hidden: Hidden | None
) -> torch.Tensor:
    """The output, which another stage needs.

    Raises:
        ConfigError: there is none, or another rank expects another shape or dtype.
    """
    stage, message = schedule.stage_of(rank, action.chunk), schedule.output_of(rank, action)
    assert message is not None, "the action makes a message"
    if output is None:
        missing = "output" if action.kind == "F" else "gradient of its input"
        raise ConfigError(
            f"stage {stage} returned no {missing} at {action}",
            fix=f"return a tensor; stage {message.to_stage} waits for it",
        )
    travels = action.kind == "F" and schedule.destination_of(message) != rank
    if travels and hidden is not None and (output.shape, output.dtype) != (hidden.shape, hidden.dtype):
        raise ConfigError(
            f"stage {stage} made {list(output.shape)} in {output.dtype} at {action}, the next expects "
            f"{list(hidden.shape)} in {hidden.dtype}",
            fix="equal sequence lengths, or variable_seq_lengths=True"
            if output.dtype == hidden.dtype
            else "return the dtype that the stages were told of, e.g. x.to(dtype)",
        )
    return output


class LiveActivations:
    """Records after every action how many activations this rank holds, and their bytes (`live`, kind memory)."""

    def __init__(self, schedule: Schedule, rank: int, stages: Sequence[Stage]) -> None:
        self._schedule = schedule
        self._rank = rank
        self._stages = stages
        self._live: set[tuple[int, int]] = set()  # microbatch, chunk

    def record(self, action: Action) -> None:
        """Count the action, where a trace is recorded."""
        if not trace.recording():
            return
        stage = self._schedule.stage_of(self._rank, action.chunk)
        key = (action.microbatch, action.chunk)
        if action.kind == "F" and not self._schedule.forward_only:
            self._live.add(key)
        elif action.kind == ("W" if self._schedule.is_split(action.microbatch, stage) else "B"):
            self._live.discard(key)
        nbytes = sum(getattr(s, "live_bytes", 0) for s in self._stages)
        now = time.monotonic()
        trace.emit("live", "memory", now, now, nbytes=nbytes, note=str(len(self._live)))
