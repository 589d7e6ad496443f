"""The memory of a run's ranks by name: a table, predicted and counted, and what filled the fullest moment.

| flag                                               | what                                                 |
|----------------------------------------------------|------------------------------------------------------|
| `--log-memory-interval N`                          | every N-th step is watched; a table after it         |
| `--log-memory-to-tensorboard`                      | the allocator's four numbers, and bytes by owner     |
| `--record-memory-history --memory-snapshot-path F` | for torch's viewer (https://pytorch.org/memory_viz)  |

    memory in MiB     parameters  gradients  moments  activations  workspace  between steps    peak  fullest in
    rank 0 predicted       22.00      22.00    44.01        10.03       4.00          88.02  102.04  forward loss
    counted                22.00      22.00    44.01         6.03       8.01          88.02  102.05  forward: aten.sub

Predicted and counted totals agree, their activations and workspace need not: what a recomputed layer keeps, and a loss
that is not yet saved, are counted as workspace.

A watched step costs several times its usual time, because every operation is looked at; other steps cost nothing. On
a GPU the row `allocated` is the allocator's own peak; what it has beyond the counted one is in no tensor of Python's.
Nor is the row `messages`: memory through which ranks of one machine send to each other (`comm/shared_memory`).

Megatron-LM: `report_memory` in `megatron/training/utils/common_utils.py`, `training_log` in
`megatron/training/training.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from minimegatron import trace
from minimegatron.comm import shared_memory
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError, ranges
from minimegatron.memory import ACTIVATIONS, WORKSPACE, Tracker
from minimegatron.models.spec import ModuleSpec, spec_from_name
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.units import units_in_trace
from minimegatron.training.model_class import has_documents
from minimegatron.training.observers import Observer, Step
from minimegatron.training.rules import batch_sizes

if TYPE_CHECKING:
    from minimegatron.footprint.prediction import Prediction, Work

OWNERS = ("parameters", "main parameters", "gradients", "moments", "communication", ACTIVATIONS, WORKSPACE)
ALLOCATOR = {  # Megatron's name -> torch's
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": "allocated_bytes.all.peak",
    "mem-allocated-count": "allocation.all.current",
}
Counted = tuple[dict[str, int], int, str, int, int]  # bytes by owner, between steps, where, allocator's, shared
Row = tuple[str, Mapping[str, int], int, str]  # label, bytes by owner, bytes between steps, where


class MemoryReport(Observer):
    """Counts the memory of steps, and reads the allocator.

    Args:
        run: the configuration.
        mesh: the ranks; all count the same steps.
        model, optimizer: the owners of tensors.
        say: prints a table.
        write: given the same numbers, for the log file.

    Raises:
        ConfigError: the allocator's history is asked for without a GPU.
    """

    def __init__(
        self,
        run: RunConfig,
        mesh: Mesh,
        model: DataParallel,
        optimizer: MixedPrecisionOptimizer,
        say: Callable[[str], None] = print,
        write: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self.run, self.mesh, self.model, self.optimizer, self.say = run, mesh, model, optimizer, say
        self.write = write
        self._counted: tuple[int, Counted] | None = None  # number of a step that was watched
        self.interval = run.training.log_memory_interval
        self.recording = run.training.record_memory_history
        if self.recording and mesh.device.type != "cuda":
            raise ConfigError(
                "record_memory_history on a CPU: torch keeps a history of its GPU allocator alone",
                fix="--log-memory-interval N counts tensors on any device; or train on a GPU",
            )
        self.recording = self.recording and mesh.world.is_last
        if self.recording:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def during_step(self, done: int) -> AbstractContextManager[None]:
        """Count memory, in every N-th step."""
        if self.interval is None or (done + 1) % self.interval:
            return contextlib.nullcontext()
        return self._watched(done + 1)

    def after_step(self, step: Step) -> None:
        """Print the table of the step, if its memory was counted."""
        if self._counted is not None:
            (iteration, mine), self._counted = self._counted, None
            rows = self._rows(gather_objects(mine, self.mesh.world))
            self.say(f"memory of step {iteration}\n{table(rows)}")
            self.write({"event": "memory", "iteration": iteration, "rows": rows})

    @contextlib.contextmanager
    def _watched(self, iteration: int) -> Iterator[None]:
        cuda = self.mesh.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.mesh.device)
        tracker = Tracker(self.held())
        with trace.ranges(tracker.phase), units_in_trace(self.model, tracker.tell), tracker:
            yield
        peak = tracker.peak
        where = f"{peak.where}: {peak.operation}" if peak.where else peak.operation
        allocated = torch.cuda.max_memory_allocated(self.mesh.device) if cuda else 0
        lasting = sum(self.bytes_held().values())
        self._counted = iteration, (dict(peak.owners), lasting, where, allocated, shared_memory.nbytes())

    def _rows(self, counted: list[Counted]) -> list[Row]:
        rows: list[Row] = []
        place = self.mesh.world.size, self.mesh.device.type
        for rank, (owners, lasting, where, allocated, shared) in enumerate(counted):
            rows += [predicted_row(f"rank {rank} predicted", predict_run(self.run, rank, *place))]
            rows += [("counted", owners, lasting, where)]
            rows += [("allocated", {}, allocated, "the allocator's peak")] * bool(allocated)
            rows += [("messages", {}, shared, "shared memory, in no tensor")] * bool(shared)
        return rows

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors that last from step to step}."""
        return {**self.model.held(), **self.optimizer.held()}

    def bytes_held(self) -> dict[str, int]:
        """{owner: bytes that last from step to step}, each storage once."""
        return {owner: _storages(tensors) for owner, tensors in self.held().items()}

    def tags(self) -> dict[str, float]:
        """Values for TensorBoard: Megatron's names on a GPU, and on any device bytes by owner."""
        tags: dict[str, float] = {f"memory/{owner}": n for owner, n in self.bytes_held().items() if n}
        if self.mesh.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.mesh.device)
            tags |= {name: stats[key] for name, key in ALLOCATOR.items()}
        return tags

    def close(self) -> None:
        """Write the history."""
        if self.recording:
            self.recording = False
            torch.cuda.memory._dump_snapshot(self.run.training.memory_snapshot_path)
            torch.cuda.memory._record_memory_history(enabled=None)


def _storages(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def predict_run(run: RunConfig, rank: int = 0, world: int = 1, device: str = "cpu") -> Prediction:
    """The memory of one rank of a run on devices of this type.

    Raises:
        ConfigError: the layout is not possible.
    """
    from minimegatron.footprint.prediction import predict  # which training needs not

    told = predict(run.model, run.parallel, run.optimizer, work_of_run(run, world, device), rank, world, spec_of(run))
    if run.training.cuda_graph_impl == "none":
        return told
    return dataclasses.replace(told, unknown=(*told.unknown, "the memory of a CUDA graph"))


@functools.cache
def _spec(names: tuple[str, str] | None, model: TransformerConfig) -> ModuleSpec | None:
    return spec_from_name(names, model)


def spec_of(run: RunConfig) -> ModuleSpec | None:
    """The spec of `--spec`, if the run has one; the same object for every call."""
    return _spec(run.spec, run.model)


def work_of_run(run: RunConfig, world: int, device: str) -> Work:
    """The work of each rank in a step.

    Raises:
        ConfigError: the batch cannot be divided over so many ranks.
    """
    from minimegatron.footprint.prediction import Work

    microbatches = batch_sizes(run.training, run.parallel.data_parallel_size(world)).at(0)
    return Work(run.data.seq_length, run.training.micro_batch_size, microbatches, has_documents(run), device)


def predicted_row(label: str, told: Prediction) -> Row:
    """A prediction as a row of the table."""
    lacks = f"{told.where}{'; ' if told.where else ''}not predicted, and not in the peak: {', '.join(told.unknown)}"
    return label, told.peak, sum(told.lasting.values()), lacks if told.unknown else told.where


def table(rows: Iterable[Row]) -> str:
    """Bytes by owner at the fullest moment, with the sum between steps, the sum at that moment, and where it is."""
    rows = list(rows)
    owners = [owner for owner in OWNERS if any(row[1].get(owner) for row in rows)]
    unit = _unit(max((sum(of.values()) for _, of, _, _ in rows), default=0))
    head = [f"memory in {unit}", *owners, "between steps", "peak"]
    cells = [[*(of.get(o, 0) for o in owners), lasting, sum(of.values()) or lasting] for _, of, lasting, _ in rows]
    lines = [[row[0], *(_in(n, unit) for n in line)] for row, line in zip(rows, cells, strict=True)]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    texts = ["fullest in", *(where for *_, where in rows)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        + (f"  {text}" if text else "")
        for line, text in zip([head, *lines], texts, strict=True)
    )


def explain(label: str, told: Prediction) -> str:
    """The owners at the fullest moment of a rank, largest first, and the bytes that a microbatch keeps."""
    if told.unknown:
        return f"{label}: activations and workspace are not predicted ({', '.join(told.unknown)})"
    unit, total = _unit(told.total), told.total
    shares = ", ".join(f"{owner} {n / total:.0%}" for owner, n in _largest(told.peak))
    lines = [f"{label} is fullest, {_in(total, unit)} {unit} in {told.where}: {shares}"]
    kept, unit = sum(told.kept.values()), _unit(sum(told.kept.values()))
    most = ", ".join(f"{step} {n / kept:.0%}" for step, n in _largest(told.kept)[:5] if n)
    if kept:
        under_way = told.peak.get(ACTIVATIONS, 0) / kept
        lines.append(
            f"a microbatch keeps {_in(kept, unit)} {unit} for its backward pass, and {under_way:.1f} of them are under "
            f"way: {most}"
        )
    if told.worst:
        unit = _unit(told.worst)
        lines.append(
            "experts are taken to get equal loads; if those of one rank get all tokens that they can, its peak is "
            f"{_in(told.worst, unit)} {unit} (a limit: --moe-expert-capacity-factor)"
        )
    return "\n".join(lines)


def _largest(of: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(of.items(), key=lambda item: -item[1])


def _unit(nbytes: int) -> str:
    return "GiB" if nbytes >= 10 * 2**30 else "MiB"


def _in(nbytes: int, unit: str) -> str:
    return f"{nbytes / 2 ** (30 if unit == 'GiB' else 20):,.2f}" if nbytes else "-"


def predicted_rows(of_ranks: Mapping[int, Prediction]) -> Iterator[Row]:
    """The predictions of several ranks as rows, each with the rank's layers."""
    for rank, told in of_ranks.items():
        yield predicted_row(f"rank {rank}, layers {ranges(told.layers) or 'none'}", told)
