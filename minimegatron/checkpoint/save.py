"""A save, from regions in memory to a checkpoint on the disk: on all ranks, at once or in the background.

The problem in a sentence: a training that waits for its disk stands still on every GPU, and one that does not wait must
not change what is being written, nor miss that it was never written.

| step    | who        | does                                                               | sent                |
|---------|------------|--------------------------------------------------------------------|---------------------|
| stage   | rank 0     | makes the folder                                                   | its name            |
| share   | rank 0     | of equal regions picks one, on the rank with the least to write    | boxes, to and fro   |
| write   | every rank | writes its file and has the disk confirm it                        | errors; file hashes |
| publish | rank 0     | writes the manifest, renames, removes what is not kept             | its error           |

In the background the same runs on a thread of each rank, on a copy of the regions (`Staging`). The thread makes the
copy too, while the next forward and backward passes run, which read weights and change none: only the optimizer waits
for it. What the passes do change, counters and the history of FP8, is copied at once. The memory of the copy is kept
for the next save: new pages cost more than the copying itself.

    step 20 | copy ....... | hash, write, fsync ............ publish |
            | forward, backward | update | forward, backward | update |
                                ^ waits for the copy

Megatron-LM: `AsyncCallsQueue` in `megatron/core/dist_checkpointing/strategies/async_utils.py`, with a process for a
thread. The choice of writers is that of torch.distributed.checkpoint (`dedup_save_plans`).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minimegatron.checkpoint.commit import Keep, discard, publish, retire, stage
from minimegatron.checkpoint.disk import write_durable
from minimegatron.checkpoint.manifest import Manifest, Stored, StoredTensor, key_of
from minimegatron.checkpoint.regions import Box, Logical, Region
from minimegatron.checkpoint.shard_file import NAMES, write_shard
from minimegatron.comm.agree import gather_to_first, on_all_ranks, on_rank_zero, scatter_from_first
from minimegatron.comm.axis import Axis
from minimegatron.errors import DeadlineError


class Held(NamedTuple):
    """The regions that a rank holds of a logical tensor, and its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[Box]


Share = list[tuple[str, Box]]  # name and box of the regions that a rank writes, in the order of its file


def save(
    root: Path,
    step: int,
    run_id: str,
    tensors: Mapping[str, Logical],
    state: Mapping[str, Any],
    axis: Axis,
    keep: Keep,
) -> None:
    """Write and publish a checkpoint; all ranks of the axis call it, and rank 0 holds the lock of the root.

    Args:
        root: folder of checkpoints.
        step, run_id, state: contents of the manifest; `state` is rank 0's.
        tensors: the regions of this rank, by logical name.
        keep: which older ones are kept.

    Raises:
        CheckpointError: on the rank where it failed; nothing has been published, or, if `retire` failed, everything.
        RankError: on the other ranks.
    """
    folder = on_rank_zero(lambda: stage(root, step, run_id), axis)
    try:
        mine = {n: Held(t.dtype, tuple(t.shape), [part.box for part in t.parts]) for n, t in tensors.items()}
        held = gather_to_first(mine, axis)
        shares = share_out(held) if held else []
        share = scatter_from_first(shares, axis)
        header = {"step": str(step), "run_id": run_id}
        path = folder / file_name(axis.rank, axis.size)
        file = on_all_ranks(lambda: _write(path, share, tensors, header) if share else None, axis)
        files = gather_to_first(file, axis)

        def finish() -> None:
            assert held is not None and files is not None
            names = [file_name(rank, axis.size) for rank in range(axis.size)]
            written = {name: file for name, file in zip(names, files, strict=True) if file is not None}
            manifest = Manifest(step, run_id, written, _described(held, shares, names), dict(state))
            publish(folder, root, manifest)
            retire(root, keep)

        on_rank_zero(finish, axis)
    except Exception:
        if axis.rank == 0:
            discard(folder)
        raise


def file_name(number: int, count: int) -> str:
    """The name of file `number` of `count` files of a checkpoint."""
    return f"shard-{number:05d}-of-{count:05d}.safetensors"


def share_out(held: Sequence[Mapping[str, Held]]) -> list[Share]:
    """For each rank the regions that it writes: each region once, by the holder with the least to write so far.

    A region counts with the bytes of its whole tensor, as in torch, so that files stay the same.

    Args:
        held: the regions that each rank holds.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, tensors in enumerate(held):
        for name, tensor in tensors.items():
            for box in tensor.boxes:
                holders.setdefault((name, box), []).append(rank)
    totals, writers = [0] * len(held), {}
    for (name, box), ranks in holders.items():
        writers[name, box] = writer = min(ranks, key=totals.__getitem__)
        tensor = held[writer][name]
        totals[writer] += math.prod(tensor.shape) * tensor.dtype.itemsize or 1
    return [
        [(name, box) for name, tensor in tensors.items() for box in tensor.boxes if writers[name, box] == rank]
        for rank, tensors in enumerate(held)
    ]


def _write(path: Path, share: Share, tensors: Mapping[str, Logical], header: Mapping[str, str]) -> tuple[int, str]:
    """Write a rank's file; returns its length and hash."""
    regions = {(name, part.box): part.data for name, tensor in tensors.items() for part in tensor.parts}
    numbers = {key_of(name, box): regions[name, box] for name, box in share}
    size = sum(tensor.nbytes for tensor in numbers.values())
    return write_durable(path, size, lambda file: write_shard(file, numbers, header))


def _described(
    held: Sequence[Mapping[str, Held]], shares: Sequence[Share], files: Sequence[str]
) -> dict[str, StoredTensor]:
    """The tensors as entries of the manifest."""
    regions: dict[str, list[Stored]] = {}
    kinds: dict[str, Held] = {}
    for tensors, share, file in zip(held, shares, files, strict=True):
        for name, box in share:
            regions.setdefault(name, []).append(Stored.of(name, box, file))
            kinds[name] = tensors[name]
    return {name: StoredTensor(NAMES[kinds[name].dtype], kinds[name].shape, tuple(r)) for name, r in regions.items()}


class Staging:
    """Copies of regions in the host's memory, which is reused by the next copy."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, Box], torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, Logical]) -> dict[str, Logical]:
        """Copy the regions; overwrites the copies of the previous call."""
        device = next((p.data.device for t in tensors.values() for p in t.parts if p.data.is_cuda), None)
        with _side_stream(device) if device is not None else contextlib.nullcontext():
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
def _side_stream(device: torch.device) -> Iterator[None]:
    """A stream that begins after the work launched so far; at the end the host waits for it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class AsyncSave:
    """A save: done at once, or under way on a thread.

    Args:
        write: the save.
        background: on a thread.
        step: the step that is saved.
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
        """Wait for the save.

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
