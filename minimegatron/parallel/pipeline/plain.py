"""The executor of pipeline schedules to read: it runs this rank's list of actions. Training uses `overlapped`.

The problem in a sentence: GPipe, 1F1B, interleaved 1F1B and the zero-bubble family compute the same gradients in other
orders, and three hand-written loops would have three sets of bugs.

    for action in schedule.actions[rank]:
        receive its input, if another rank makes it
        F: y  = stage.forward(mb, x)    send y to the next stage
        B: dx = stage.backward(mb, dy)  send dx to the previous stage
        W: stage.weights(mb)
    wait for the sends

The list has no sends and receives, because they follow from it: a rank receives its neighbour's outputs in the order in
which the neighbour's list makes them (`Schedule.messages`). A receive blocks, a send does not, so a deadlock needs a
cycle between lists, and `schedule_check.check` finds those before anything runs. Neighbouring stages on one rank
(V-shaped placements) pass their tensors directly.

| message                    | bytes   | to                         |
|----------------------------|---------|----------------------------|
| activation of a microbatch | s b h k | rank of the next stage     |
| its gradient               | s b h k | rank of the previous stage |

(k bytes an element; s is s/cp with context parallelism, s/(cp t) with sequence parallelism as well. A stage may send
more tensors, by name.)

`execution.compute` runs an action on a stage: autograd runs from the detached input of the stage to its output.

`parallel/pipeline/overlapped` has the same call, gives the same bits, and does three things better: it posts receives
one action ahead, so that messages travel while their receiver computes; it releases a sent tensor when it has arrived,
not at the end of the list; and it sends no header before a gradient, whose shape its receiver knows.

On NCCL every directed edge has a communicator of its own (`comm/p2p`), and a receive blocks the stream, not the host.

The trace has a span for every action (name F, B or W, note `microbatch.chunk`), `send` and `recv` on axis `pp`, `wait`
for the time that the rank waits for input, and after every action the live activations of the stage (`live`, kind
memory).

Megatron-LM: the three `forward_backward_*` functions in `megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minimegatron.parallel.pipeline.actions import Message, Schedule
from minimegatron.parallel.pipeline.execution import (
    FunctionStage,
    LiveActivations,
    PendingTensors,
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
    """Run this rank's list; every rank of the pipeline calls it with the same schedule.

    Args:
        schedule: which rank does what.
        stages: this rank's stages by chunk, which declare the tensors of their input and output.
        p2p: messages to the other ranks; None where the schedule has one rank.
        checked: the schedule has passed `schedule_check.check` already.

    Raises:
        ConfigError: the schedule cannot run (`schedule_check.check`) or is for another number of ranks or chunks; or a
            stage's output is not what its specs say.
        RuntimeError: another rank has gone, or did not send within the deadline.
    """
    rank = begin(schedule, stages, p2p, checked)
    incoming = {source: deque(schedule.messages(source, rank)) for source in range(schedule.p)}  # not yet received
    ready: dict[Message, Tensors] = {}  # received, or made on this rank, and not yet used
    live = LiveActivations(schedule, rank, stages)
    for action in schedule.actions[rank]:
        x = None
        needed = schedule.input_of(rank, action)
        if needed is not None:
            source = schedule.source_of(needed)
            while needed not in ready:  # in the order in which the source sends
                message = incoming[source].popleft()
                assert p2p is not None, "a message from another rank"
                specs = input_specs(schedule, stages, message)
                ready[message] = PendingTensors(p2p, source, str(message), specs).wait()
            x = ready.pop(needed)
        output = compute(stages[action.chunk], action, x)
        outgoing = schedule.output_of(rank, action)
        if outgoing is not None:
            output = require_output(schedule, rank, action, output, stages)
            destination = schedule.destination_of(outgoing)
            if destination == rank:
                ready[outgoing] = {name: tensor.detach() for name, tensor in output.items()}
            else:
                assert p2p is not None, "a message to another rank"
                send(p2p, output, destination, str(outgoing), output_specs(stages, action))
        live.record(action)
    if p2p is not None:
        p2p.wait_sends()
