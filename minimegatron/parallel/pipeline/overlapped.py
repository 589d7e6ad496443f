"""The executor of pipeline schedules that trains: messages travel while their receiver computes.

The problem in a sentence: the simple executor (`parallel/pipeline/plain`) posts a receive when its action is next, so
a message can travel only while its receiver waits.

    for action in schedule.actions[rank]:
        post the receive of the next action      it travels while this action computes
        wait for its input                       (its receive was posted one action ahead)
        F: y  = stage.forward(mb, x)    send y to the next stage
        B: dx = stage.backward(mb, dy)  send dx to the previous stage
        W: stage.weights(mb)
    wait for the sends that are pending

The call, the lists and the results are those of the plain executor. Three things are added:

- **Receives are posted one action ahead, and no further.** On a GPU a posted receive is a kernel that spins on some
  multiprocessors until its message comes. The first rank of GPipe receives nothing before its first gradient, and would
  compute all forwards beside such a kernel.
- **Sent tensors are released before the end.** A message from a rank proves that this rank had received the inputs of
  all its earlier actions (`_arrivals`).
- **Headers are sent only where they are needed.** An activation of unknown shape has a header; its gradient has none,
  because the sender of y knows the shape of dy. A receive of unknown shape is posted in two parts, the second when its
  header has come.

Receives of one edge are posted in the sender's order, whatever the order in which they are needed. On NCCL each edge
has a communicator of its own, and no schedule that `schedule_check.check` accepts deadlocks (`comm/p2p`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minimegatron.parallel.pipeline.actions import Action, Message, Schedule
from minimegatron.parallel.pipeline.execution import (
    FunctionStage,
    LiveActivations,
    PendingTensors,
    Specs,
    Stage,
    Tensors,
    TensorSpec,
    begin,
    compute,
    input_specs,
    output_specs,
    require_output,
    send,
)

if TYPE_CHECKING:
    from minimegatron.comm.p2p import PointToPoint

__all__ = ["FunctionStage", "Stage", "TensorSpec", "run"]


def run(
    schedule: Schedule,
    stages: Sequence[Stage],
    p2p: PointToPoint | None = None,
    *,
    checked: bool = False,
) -> None:
    """Run this rank's list, as `plain.run` does; every rank of the pipeline calls it with the same schedule.

    Arguments and errors are those of `plain.run`.
    """
    rank = begin(schedule, stages, p2p, checked)
    executor = _Executor(schedule, rank, stages, p2p)
    for index in range(len(schedule.actions[rank])):
        executor.step(index)
    if p2p is not None:
        p2p.wait_sends()


class _Executor:
    """Runs one rank's list once."""

    def __init__(self, schedule: Schedule, rank: int, stages: Sequence[Stage], p2p: PointToPoint | None) -> None:
        self.schedule = schedule
        self.rank = rank
        self.stages = stages
        self.p2p = p2p
        self.actions = schedule.actions[rank]
        self.local: dict[Message, Tensors] = {}  # between two stages of this rank
        self.posted: dict[Message, PendingTensors] = {}
        self.sent: dict[Message, Specs] = {}  # of unknown shape: the gradients that come back have these
        neighbours = range(schedule.p)
        self.edges = {source: schedule.messages(source, rank) for source in neighbours}
        self.ahead = self._one_ahead()
        self.next = dict.fromkeys(neighbours, 0)  # first message of the edge that is not posted
        self.arrivals = {source: _arrivals(schedule, rank, source) for source in neighbours if self.edges[source]}
        self.pending = {to: deque[int]() for to in neighbours}  # tensors of each message that may be under way
        self.live = LiveActivations(schedule, rank, stages)

    def step(self, index: int) -> None:
        """Run the action at this index of the list."""
        action = self.actions[index]
        self._post(action)  # first: the sender of the next input may wait for this receive
        self._look_ahead(self.ahead[index])  # costs nothing while the input is still under way
        x = self._input(action)
        self._look_ahead(self.ahead[index])  # once more: where shapes were unknown, the input's header has come
        output = compute(self.stages[action.chunk], action, x)
        del x
        self._output(action, output)
        self.live.record(action)

    # ---------------------------------------------------------------------------------------------- receives

    def _one_ahead(self) -> list[Message | None]:
        """For each index of the list the message from another rank that the following action needs, or None."""
        needed = [self.schedule.input_of(self.rank, action) for action in self.actions]
        remote = [m if m is not None and self.schedule.source_of(m) != self.rank else None for m in needed]
        return [*remote[1:], None]

    def _post(self, action: Action) -> None:
        """Post the receive of the action's input, if another rank sends it and it is not posted yet."""
        message = self.schedule.input_of(self.rank, action)
        if message is not None and (source := self.schedule.source_of(message)) != self.rank:
            self._post_until(message, source)

    def _look_ahead(self, message: Message | None) -> None:
        """Post the receive that the next action will need."""
        if message is not None:
            source = self.schedule.source_of(message)
            if self._needs_no_header(message, source):
                self._post_until(message, source)

    def _specs(self, message: Message) -> Specs:
        """The tensors of a message to this rank, as far as they are known here."""
        if message.kind == "B" and (sent := self.sent.get(_activation_of(message))) is not None:
            return sent
        return input_specs(self.schedule, self.stages, message)

    def _needs_no_header(self, message: Message, source: int) -> bool:
        """Whether all receives up to this one can be posted without waiting for a header, or for an output of this
        rank."""
        if message in self.posted or not all(r.payload_posted for r in self.posted.values()):
            return False
        edge = self.edges[source]
        coming = edge[self.next[source] : edge.index(message) + 1]
        if all(spec.shape is not None for m in coming for spec in self._specs(m).values()):
            return True
        return coming == [message] and message.kind == "F"

    def _post_until(self, message: Message, source: int) -> None:
        """Post this edge's receives, in order, up to and including this message."""
        assert self.p2p is not None, "a message from another rank"
        while message not in self.posted:
            for earlier in self.posted.values():
                if not earlier.payload_posted:
                    earlier.post_payload()
            coming = self.edges[source][self.next[source]]
            self.next[source] += 1
            specs = self._specs(coming)
            if coming.kind == "B":
                self.sent.pop(_activation_of(coming), None)
            self.posted[coming] = PendingTensors(self.p2p, source, str(coming), specs)

    def _input(self, action: Action) -> Tensors | None:
        """Wait for the action's input."""
        message = self.schedule.input_of(self.rank, action)
        if message is None:
            return None
        source = self.schedule.source_of(message)
        if source == self.rank:
            return self.local.pop(message)
        x = self.posted.pop(message).wait()
        assert self.p2p is not None, "a message from another rank"
        arrived = self.arrivals[source].pop(message)
        self.p2p.release_sends(source, sum(self.pending[source].popleft() for _ in range(arrived)))
        return x

    # ---------------------------------------------------------------------------------------------- sends

    def _output(self, action: Action, output: Tensors | None) -> None:
        """Send the action's output, or keep it for the next stage on this rank."""
        message = self.schedule.output_of(self.rank, action)
        if message is None:
            return
        output = require_output(self.schedule, self.rank, action, output, self.stages)
        destination = self.schedule.destination_of(message)
        if destination == self.rank:
            self.local[message] = {name: tensor.detach() for name, tensor in output.items()}
            return
        assert self.p2p is not None, "a message to another rank"
        specs = output_specs(self.stages, action)
        sizes: Specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in output.items()}
        if action.kind == "F" and any(spec.shape is None for spec in specs.values()):
            self.sent[message] = {name: spec for name, spec in sizes.items() if spec.has_gradient}
        send(self.p2p, output, destination, str(message), specs if action.kind == "F" else sizes)
        self.pending[destination].append(len(specs))


def _activation_of(gradient: Message) -> Message:
    """The activation of which this message is the gradient."""
    return Message("F", gradient.microbatch, gradient.to_stage + 1)


def _arrivals(schedule: Schedule, rank: int, other: int) -> dict[Message, int]:
    """For each message from `other`: how many more messages to `other` it proves to have arrived than the message
    before.

    `other` made it in an action of its list, and had by then received the inputs of all its earlier actions. Messages
    are counted in the order in which they are sent, up to the first that is not proved.
    """
    used = {}  # our message -> place in the other's list of the action that needs it
    made = {}  # the other's message -> place of the action that makes it
    for index, action in enumerate(schedule.actions[other]):
        needed = schedule.input_of(other, action)
        if needed is not None:
            used[needed] = index
        message = schedule.message_of(other, action)
        if message is not None:
            made[message] = index
    ours = [used.get(message, len(schedule.actions[other])) for message in schedule.messages(rank, other)]
    counts, proved = {}, 0
    for message in schedule.messages(other, rank):
        count = 0
        while proved + count < len(ours) and ours[proved + count] <= made[message]:
            count += 1
        counts[message] = count
        proved += count
    return counts
