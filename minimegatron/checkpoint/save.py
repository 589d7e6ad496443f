"""One save, from regions in memory to a checkpoint on the disk: on all ranks, at once or in the background.

The problem in a sentence: a training that waits for its disk stands still on every GPU, and one that does not wait must
not change what is being written, nor miss that it was never written.

| `save`                     | on rank 0                   | on every rank                                        |
|----------------------------|-----------------------------|------------------------------------------------------|
| stage                      | makes the folder            | learns its name, or why there is none                |
| plan, write (`planning`)   | publishes                   | writes its file; all raise the error of the first    |
| retire                     | removes what is not kept    |                                                      |

In the background the same runs on a thread of each rank, on a copy of the regions (`Staging`) that the next step cannot
change. The thread makes the copy too, while the next forward and backward passes run, which read weights and change
none: only the optimizer waits for it, if it is not done by then. What the passes do change, counters and the history of
FP8, is copied at once. The memory of the copy is kept for the next save: new pages cost more than the copying itself.

    step 20 | copy ....... | hash, write, fsync ............ publish |
            | forward, backward | update | forward, backward | update |
                                ^ waits for the copy

Megatron-LM: `AsyncCallsQueue` in `megatron/core/dist_checkpointing/strategies/async_utils.py`, with a process for a
thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from minimegatron.checkpoint.commit import Keep, discard, retire, stage
from minimegatron.checkpoint.planning import write_tensors
from minimegatron.checkpoint.regions import Box, Logical, Region
from minimegatron.checkpoint.storage import ShardWriter
from minimegatron.comm.agree import on_rank_zero
from minimegatron.comm.axis import Axis
from minimegatron.errors import CheckpointError, DeadlineError


def save(
    root: Path,
    step: int,
    run_id: str,
    tensors: Mapping[str, Logical],
    state: Mapping[str, Any],
    axis: Axis,
    keep: Keep,
) -> None:
    """Write and publish a checkpoint; all ranks of the axis call, and rank 0 holds the lock of the root.

    Args:
        root: folder of checkpoints.
        step, run_id, state: of the manifest; `state` is rank 0's.
        tensors: the regions of this rank, by logical name.
        keep: which older ones stay.

    Raises:
        CheckpointError, RankError: on every rank; nothing has been published, or, of `retire`, all of it.
    """
    staged = on_rank_zero(lambda: stage(root, step, run_id), axis)
    try:
        write_tensors(tensors, ShardWriter(staged, root, step, run_id, state), axis)
    except CheckpointError:
        if axis.rank == 0:
            discard(staged)
        raise
    on_rank_zero(lambda: retire(root, keep), axis)


class Staging:
    """Copies of regions in memory of the host, which is kept from one copy to the next."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, Box], torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, Logical]) -> dict[str, Logical]:
        """The same regions with copied numbers; the copies of the call before are overwritten."""
        device = next((p.data.device for t in tensors.values() for p in t.parts if p.data.is_cuda), None)
        with _beside(device) if device is not None else contextlib.nullcontext():
            return {
                name: Logical(t.shape, [Region(p.box, self._copy(name, p)) for p in t.parts], t.dtype)
                for name, t in tensors.items()
            }

    def _copy(self, name: str, part: Region) -> torch.Tensor:
        held = self._held.get((name, part.box))
        if held is None or held.dtype != part.data.dtype:
            held = torch.empty(part.sizes, dtype=part.data.dtype, pin_memory=part.data.is_cuda)
            self._held[name, part.box] = held
        return held.copy_(part.data.detach(), non_blocking=True)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a stream of its own, behind what the GPU was asked for so far; at the end the host waits for it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class Flight:
    """A save under way: over at once, or on a thread.

    Args:
        write: the save.
        background: on a thread.
        step: that is saved.
    """

    def __init__(self, write: Callable[[], None], background: bool, step: int) -> None:
        self.step = step
        self._error: BaseException | None = None
        self._write = write
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised by `result`, on the rank's own thread
            self._error = error

    def ended(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for it.

        Raises:
            DeadlineError: it takes longer.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        if not self.ended():
            raise DeadlineError(
                f"the checkpoint of iteration {self.step} is not written after {seconds:g} s",
                fix="look at the disk of --save, or raise --distributed-timeout-minutes",
            )

    def result(self) -> None:
        """Raise what the save has raised."""
        if self._error is not None:
            raise self._error
