"""The parts that both executors of pipeline schedules share: the interface of a stage, checks, and trace events.

| executor     | receives                        | sent tensors                    | used by              |
|--------------|---------------------------------|---------------------------------|----------------------|
| `plain`      | when the action needs its input | kept until the end of the list  | readers, tests, labs |
| `overlapped` | posted one action ahead         | released when they have arrived | training             |

Both run any schedule with the same call, `run(schedule, stages, p2p)`, and give the same gradients. Which messages an
action needs and makes is derived from the lists (`Schedule.input_of`, `Schedule.output_of`).

A stage is any object with `forward`, `backward` and `weights`: a part of a model (`parallel/pipeline/stage`), or a
`sleep`. It declares the named tensors of its input and its output (`inputs`, `outputs`): the hidden state of a
decoder, in another model also the output of an encoder. Gradients come back under the same names.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minimegatron import trace
from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Message, Schedule
from minimegatron.parallel.pipeline.schedule_check import require_runnable

if TYPE_CHECKING:
    from minimegatron.comm.p2p import PendingRecv, PointToPoint


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is sent between stages, as far as both sides know them beforehand.

    Attributes:
        shape: None where microbatches have different shapes: a header before the tensor has it.
        dtype: None where a header has it; a tensor of integers has no gradient.
    """

    shape: torch.Size | None = None
    dtype: torch.dtype | None = None

    @property
    def has_gradient(self) -> bool:
        return self.dtype is None or self.dtype.is_floating_point


Tensors = dict[str, torch.Tensor]  # of one microbatch, between stages; sent in the order of the names
Specs = Mapping[str, TensorSpec]


class Stage(Protocol):
    """The interface that an executor needs of a stage.

    Attributes:
        inputs: specs of its input, from the previous stage.
        outputs: specs of its output, which are the inputs of the next stage.
    """

    inputs: Specs
    outputs: Specs

    def forward(self, microbatch: int, x: Tensors | None) -> Tensors | None:
        """Compute the output for the next stage (unused on the last); `x` is that of the previous stage, None on the
        first."""

    def backward(self, microbatch: int, dy: Tensors | None) -> Tensors | None:
        """Compute gradients of the input (unused on the first stage); `dy` are those of the output, None on the last
        stage."""

    def weights(self, microbatch: int) -> None:
        """Compute the wgrad that `backward` of this microbatch has left (only if the schedule has a W)."""


ONE_TENSOR: Specs = {"hidden": TensorSpec()}


def _nothing(*_: Any) -> None:
    return None


class FunctionStage:
    """A stage of three plain functions of one tensor, e.g. sleeps.

    Args:
        forward, backward: (microbatch, tensor or None) -> tensor or None.
        weights: microbatch -> None.
        hidden: spec of the tensor that is sent; default one with a header.
    """

    def __init__(
        self,
        forward: Callable[[int, torch.Tensor | None], torch.Tensor | None],
        backward: Callable[[int, torch.Tensor | None], torch.Tensor | None] = _nothing,
        weights: Callable[[int], None] = _nothing,
        hidden: TensorSpec = TensorSpec(),
    ) -> None:
        self._forward, self._backward, self.weights = forward, backward, weights
        self.inputs: Specs = {"hidden": hidden}
        self.outputs: Specs = self.inputs

    def forward(self, microbatch: int, x: Tensors | None) -> Tensors | None:
        """See `Stage`."""
        y = self._forward(microbatch, None if x is None else x["hidden"])
        return None if y is None else {"hidden": y}

    def backward(self, microbatch: int, dy: Tensors | None) -> Tensors | None:
        """See `Stage`."""
        dx = self._backward(microbatch, None if dy is None else dy["hidden"])
        return None if dx is None else {"hidden": dx}


def input_specs(schedule: Schedule, stages: Sequence[Stage], message: Message) -> Specs:
    """The tensors of a message to one of these stages: its input, or the gradients of its output."""
    stage = stages[schedule.rank_of(message.to_stage)[1]]
    return stage.inputs if message.kind == "F" else _gradients(stage.outputs)


def output_specs(stages: Sequence[Stage], action: Action) -> Specs:
    """The tensors that an action of one of these stages makes: its output, or the gradients of its input."""
    stage = stages[action.chunk]
    return stage.outputs if action.kind == "F" else _gradients(stage.inputs)


def _gradients(specs: Specs) -> Specs:
    return {name: spec for name, spec in specs.items() if spec.has_gradient}


class PendingTensors:
    """Posted receives of one message's tensors. `wait()` returns them.

    Args:
        p2p: the connection.
        source: position of the sender.
        what: the message, for the trace.
        specs: its tensors; those after one without a shape cannot be posted before its header has come.
    """

    def __init__(self, p2p: PointToPoint, source: int, what: str, specs: Specs) -> None:
        self._p2p, self._source, self._what = p2p, source, what
        self._specs = specs
        self._left = sorted(specs)
        self._posted: dict[str, PendingRecv] = {}
        self._post()

    @property
    def payload_posted(self) -> bool:
        """Whether all tensors are posted; before that nothing else may be posted from the same sender."""
        return not self._left and all(receive.payload_posted for receive in self._posted.values())

    def post_payload(self) -> None:
        """Wait for the headers, if there are any, and post all tensors."""
        while not self.payload_posted:
            for receive in self._posted.values():
                receive.post_payload()
            self._post()

    def wait(self) -> Tensors:
        """Block until the tensors have arrived.

        Raises:
            RuntimeError: the sender has gone, or did not send within the deadline.
        """
        self.post_payload()
        return {name: receive.wait() for name, receive in self._posted.items()}

    def _post(self) -> None:
        while self._left and all(receive.payload_posted for receive in self._posted.values()):
            name = self._left.pop(0)
            spec, what = self._specs[name], label(self._what, name, self._specs)
            self._posted[name] = self._p2p.irecv(self._source, what, spec.shape, spec.dtype)


def send(p2p: PointToPoint, tensors: Tensors, to: int, what: str, specs: Specs) -> None:
    """Start sending a message's tensors, and go on; a tensor without a known shape is sent after a header."""
    for name in sorted(specs):
        p2p.isend(tensors[name], to, label(what, name, specs), header=specs[name].shape is None)


def label(what: str, name: str, specs: Specs) -> str:
    """The name of a tensor in the trace: the message, and the tensor's name if there are several."""
    return what if len(specs) == 1 else f"{what} {name}"


def begin(schedule: Schedule, stages: Sequence[Stage], p2p: PointToPoint | None, checked: bool) -> int:
    """Check that the schedule can run here, and open the connections; returns this rank's position in the pipeline.

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


def compute(stage: Stage, action: Action, x: Tensors | None) -> Tensors | None:
    """Run the action on its stage, recorded as a span named F, B or W with the note `microbatch.chunk`."""
    with trace.span(action.kind, note=f"{action.microbatch}.{action.chunk}"):
        if action.kind == "F":
            return stage.forward(action.microbatch, x)
        if action.kind == "B":
            return stage.backward(action.microbatch, x)
        stage.weights(action.microbatch)
        return None


def require_output(
    schedule: Schedule, rank: int, action: Action, output: Tensors | None, stages: Sequence[Stage]
) -> Tensors:
    """The output, checked to be what another stage needs.

    Raises:
        ConfigError: there is none, it has other names, or another rank expects another shape or dtype.
    """
    stage, message = schedule.stage_of(rank, action.chunk), schedule.output_of(rank, action)
    assert message is not None, "the action makes a message"
    specs = output_specs(stages, action)
    if output is None:
        missing = "output" if action.kind == "F" else "gradient of its input"
        raise ConfigError(
            f"stage {stage} returned no {missing} at {action}",
            fix=f"return a tensor; stage {message.to_stage} waits for it",
        )
    if output.keys() != specs.keys():
        raise ConfigError(
            f"stage {stage} made {', '.join(output) or 'nothing'} at {action}, and says that it makes "
            f"{', '.join(specs) or 'nothing'}",
            fix=f"return the tensors that stage {message.to_stage} waits for",
        )
    travels = action.kind == "F" and schedule.destination_of(message) != rank
    for name, spec in specs.items():
        tensor = output[name]
        if travels and spec.shape is not None and (tensor.shape, tensor.dtype) != (spec.shape, spec.dtype):
            raise ConfigError(
                f"stage {stage} made {list(tensor.shape)} in {tensor.dtype} at {label(str(action), name, specs)}, the "
                f"next expects {list(spec.shape)} in {spec.dtype}",
                fix="equal sequence lengths, or variable_seq_lengths=True"
                if tensor.dtype == spec.dtype
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
        """Count the action, if a trace is recorded."""
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
