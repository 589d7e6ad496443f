"""The executor of pipeline schedules: runs this rank's list of actions, whatever the schedule is called.

The problem in a sentence: GPipe, 1F1B, interleaved 1F1B and the zero-bubble family compute the same gradients in other
orders, and three hand-written loops would have three sets of bugs.

    for action in schedule.actions[rank]:
        post the receive of the next action      it travels while this one is computed
        wait for its input                       (it was posted one action ahead)
        F: y  = stage.forward(mb, x)    send y to the stage after
        B: dx = stage.backward(mb, dy)  send dx to the stage before
        W: stage.weights(mb)
    drain

Sends and receives are not in the list. They follow from it: what a rank takes from a neighbour, and in which order, is
what the neighbour's list makes (`Schedule.messages`). Sends are never waited for, so only an order of work that waits
for itself can deadlock, and `schedule_check` finds that on paper. Neighbouring stages on one rank (V-shaped placements)
hand over directly.

| what travels               | bytes   | to                     |
|----------------------------|---------|------------------------|
| activation of a microbatch | s b h k | rank of the next stage |
| its gradient               | s b h k | and back               |

(k bytes an element; s/cp, and s/(cp t) with sequence parallelism.)

A stage is anything with `forward`, `backward` and `weights`: a part of a model (`parallel/stage`), or a `sleep`.

Measured: a span for every action (name F, B or W, note `microbatch.chunk`), `send` and `recv` on axis `pp`, `wait` for
time spent without input, and after every action the stage's activations that are alive (`live`, kind memory).

Megatron-LM: the three `forward_backward_*` functions in `megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from minimegatron import trace
from minimegatron.comm.p2p import PointToPoint, Receiving
from minimegatron.errors import ConfigError
from minimegatron.parallel.actions import Action, Message, Schedule
from minimegatron.parallel.schedule_check import require_runnable


class Stage(Protocol):
    """What the executor needs of a stage."""

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
    """Shape and dtype of what travels between stages, where both sides know it beforehand."""

    shape: torch.Size
    dtype: torch.dtype


def run(
    schedule: Schedule,
    stages: Sequence[Stage],
    mail: PointToPoint | None = None,
    hidden: Hidden | None = None,
    *,
    checked: bool = False,
) -> None:
    """Run this rank's list; every rank of the pipeline calls it with the same schedule.

    Args:
        schedule: who does what.
        stages: this rank's stages by chunk.
        mail: of this rank; None where the schedule has one rank.
        hidden: what travels; None sends a header before every activation.
        checked: the schedule has passed `schedule_check.check` already.

    Raises:
        ConfigError: before anything runs: the checker's sentences, or a schedule for another number of ranks or chunks.
            Or a stage's output is not as `hidden` says.
        RuntimeError: another rank has gone, or did not send within the deadline.
    """
    ranks, rank = (mail.pp.size, mail.pp.rank) if mail is not None else (1, 0)
    if schedule.p != ranks or schedule.v != len(stages):
        raise ConfigError(
            f"schedule `{schedule.name}` is for {schedule.p} ranks with {schedule.v} stages each; "
            f"here are {ranks} with {len(stages)}",
            fix="build it for this pipeline",
        )
    if not checked:
        require_runnable(schedule)
    if mail is not None:
        mail.connect([(a, b) for a in range(ranks) for b in range(ranks) if schedule.messages(a, b)])
    executor = _Executor(schedule, rank, stages, mail, hidden)
    for index in range(len(schedule.actions[rank])):
        executor.step(index)
    if mail is not None:
        mail.drain()


class _Executor:
    """One run of one rank's list."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Sequence[Stage],
        mail: PointToPoint | None,
        hidden: Hidden | None,
    ) -> None:
        self.schedule, self.rank, self.stages, self.mail, self.hidden = schedule, rank, stages, mail, hidden
        self.actions = schedule.actions[rank]
        self.local: dict[Message, torch.Tensor | None] = {}  # handed over on this rank
        self.posted: dict[Message, Receiving] = {}
        self.sent: dict[Message, Hidden] = {}  # without `hidden`: the gradient that comes back has this shape
        self.live: set[tuple[int, int]] = set()
        neighbours = range(schedule.p)
        self.edges = {source: schedule.messages(source, rank) for source in neighbours}
        self.coming = self._one_ahead()
        self.next = dict.fromkeys(neighbours, 0)  # first message of the edge that is not posted
        self.acknowledged = {s: _acknowledged(schedule, rank, s) for s in neighbours if self.edges[s]}

    def step(self, index: int) -> None:
        """Do the action at this place of the list."""
        action = self.actions[index]
        self._post(action)  # first: it may be what the sender of the next input waits for
        self._look_ahead(self.coming[index])  # costs nothing while the input is still on its way
        x = self._input(action)
        self._look_ahead(self.coming[index])  # once more: where shapes were unknown, the input's header has told
        stage, note = self.stages[action.chunk], f"{action.microbatch}.{action.chunk}"
        with trace.span(action.kind, note=note):
            if action.kind == "F":
                output = stage.forward(action.microbatch, x)
            elif action.kind == "B":
                output = stage.backward(action.microbatch, x)
            else:
                output = stage.weights(action.microbatch)  # type: ignore[func-returns-value]
        del x
        self._output(action, output)
        if trace.recording():
            self._record_live(action)

    # ---------------------------------------------------------------------------------------------- messages

    def _wanted(self, action: Action) -> Message | None:
        """The message that is the action's input; None at the ends of the pipeline, and for W."""
        stage = self.schedule.stage_of(self.rank, action.chunk)
        before = {"F": stage - 1, "B": stage + 1}.get(action.kind, -1)
        if not 0 <= before < self.schedule.stages:
            return None
        return Message(action.kind, action.microbatch, stage)

    def _source(self, message: Message) -> int:
        """The rank that makes a message."""
        return self.schedule.rank_of(message.to_stage + (-1 if message.kind == "F" else 1))[0]

    def _post(self, action: Action) -> None:
        """Post the receive of the action's input, if another rank makes it and it is not posted yet."""
        message = self._wanted(action)
        if message is not None and (source := self._source(message)) != self.rank:
            self._post_until(message, source)

    def _input(self, action: Action) -> torch.Tensor | None:
        message = self._wanted(action)
        if message is None:
            return None
        source = self._source(message)
        if source == self.rank:
            return self.local.pop(message)
        x = self.posted.pop(message).wait()
        assert self.mail is not None, "a message from another rank"
        self.mail.taken(source, self.acknowledged[source].pop(message))
        return x

    def _look_ahead(self, message: Message | None) -> None:
        """Post the receive that the next action will need."""
        if message is not None:
            source = self._source(message)
            if self.hidden is not None or self._needs_no_header(message, source):
                self._post_until(message, source)

    def _one_ahead(self) -> list[Message | None]:
        """For each place of the list the message that the action after it takes from another rank, if it takes one.

        No further ahead: on a GPU a posted receive is a kernel that spins on some multiprocessors until its message
        comes. The first rank of GPipe takes nothing from elsewhere before its first gradient, and would compute all
        forwards beside such a kernel.
        """
        wanted = [self._wanted(action) for action in self.actions]
        remote = [m if m is not None and self._source(m) != self.rank else None for m in wanted]
        return [*remote[1:], None]

    def _needs_no_header(self, message: Message, source: int) -> bool:
        """Whether all receives up to this one can be posted without waiting for a header, or for a shape of ours."""
        if message in self.posted or not all(r.opened for r in self.posted.values()):
            return False
        edge = self.edges[source]
        coming = edge[self.next[source] : edge.index(message) + 1]
        return coming == [message] if message.kind == "F" else all(_answered(m) in self.sent for m in coming)

    def _post_until(self, message: Message, source: int) -> None:
        """Post this edge's receives, in order, up to and with this message."""
        assert self.mail is not None, "a message from another rank"
        while message not in self.posted:
            for earlier in self.posted.values():
                if not earlier.opened:
                    earlier.open()
            coming = self.edges[source][self.next[source]]
            self.next[source] += 1
            shape = self.hidden
            if shape is None and coming.kind == "B":
                shape = self.sent.pop(_answered(coming))
            what = f"{coming.kind}{coming.microbatch} for stage {coming.to_stage}"
            self.posted[coming] = self.mail.receive(
                source, what, shape.shape if shape else None, shape.dtype if shape else None
            )

    def _output(self, action: Action, output: torch.Tensor | None) -> None:
        """Pass on what an action made."""
        stage = self.schedule.stage_of(self.rank, action.chunk)
        to = {"F": stage + 1, "B": stage - 1}.get(action.kind, -1)
        if not 0 <= to < self.schedule.stages:
            return
        message = Message(action.kind, action.microbatch, to)
        if output is None:
            missing = "output" if action.kind == "F" else "gradient of its input"
            raise ConfigError(
                f"stage {stage} returned no {missing} at {action}", fix=f"return a tensor; stage {to} waits for it"
            )
        destination = self.schedule.rank_of(to)[0]
        if destination == self.rank:
            self.local[message] = output.detach()
            return
        assert self.mail is not None, "a message to another rank"
        if action.kind == "F":
            self._check_output(output, stage, action)
            if self.hidden is None:
                self.sent[message] = Hidden(output.shape, output.dtype)
        what = f"{action.kind}{action.microbatch} for stage {to}"
        self.mail.send(output, destination, what, header=self.hidden is None and action.kind == "F")

    def _check_output(self, output: torch.Tensor, stage: int, action: Action) -> None:
        if self.hidden is not None and (output.shape, output.dtype) != (self.hidden.shape, self.hidden.dtype):
            raise ConfigError(
                f"stage {stage} made {list(output.shape)} in {output.dtype} at {action}, the next expects "
                f"{list(self.hidden.shape)} in {self.hidden.dtype}",
                fix="equal sequence lengths, or variable_seq_lengths=True",
            )

    # ---------------------------------------------------------------------------------------------- record

    def _record_live(self, action: Action) -> None:
        stage = self.schedule.stage_of(self.rank, action.chunk)
        key = (action.microbatch, action.chunk)
        if action.kind == "F" and not self.schedule.forward_only:
            self.live.add(key)
        elif action.kind == ("W" if self.schedule.is_split(action.microbatch, stage) else "B"):
            self.live.discard(key)
        nbytes = sum(getattr(s, "live_bytes", 0) for s in self.stages)
        now = time.monotonic()
        trace.emit("live", "memory", now, now, nbytes=nbytes, note=str(len(self.live)))


def _answered(gradient: Message) -> Message:
    """The activation whose gradient this is."""
    return Message("F", gradient.microbatch, gradient.to_stage + 1)


def _acknowledged(schedule: Schedule, rank: int, other: int) -> dict[Message, int]:
    """For each message from `other`: how many messages to `other` it proves to have arrived, since the one before.

    `other` made it in an action of its list, and had by then taken the inputs of all its actions before. Messages are
    counted in the order in which they are sent, up to the first that is not proved.
    """
    used = {}  # our message -> place in the other's list of the action that takes it
    made = {}  # the other's message -> place of the action that makes it
    for index, action in enumerate(schedule.actions[other]):
        stage = schedule.stage_of(other, action.chunk)
        used[Message(action.kind, action.microbatch, stage)] = index
        message = schedule.message_of(other, action)
        if message is not None:
            made[message] = index
    ours = [used.get(message, len(used)) for message in schedule.messages(rank, other)]
    counts, proved = {}, 0
    for message in schedule.messages(other, rank):
        count = 0
        while proved + count < len(ours) and ours[proved + count] <= made[message]:
            count += 1
        counts[message] = count
        proved += count
    return counts
