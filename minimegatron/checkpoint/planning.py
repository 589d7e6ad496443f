"""Who writes which region, and which stored regions a wanted one is read from: torch's planning over our regions.

The problem in a sentence: replicas hold the same regions and one of them should write each, and a run of another layout
wants regions that nobody has written as they are.

| step        | on     | does                                                                                          |
|-------------|--------|-----------------------------------------------------------------------------------------------|
| local plan  | each   | one item for each region that is here                                                         |
| global plan | rank 0 | of equal regions one is kept, on the rank with the least to write; all must fill their tensor |
| write       | each   | what the plan has left it                                                                     |
| local plan  | each   | loading: the intersections of what is wanted here with what is stored                         |

Saving is torch's own `DefaultSavePlanner`. Loading is written here: torch's default planner knows tensors and DTensors
only, and has a branch that unpickles. Where there is one rank the same steps are called in a row: `dcp.save` would warn
that there are no others.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from minimegatron.checkpoint.regions import Logical
from minimegatron.checkpoint.storage import ShardReader, ShardWriter
from minimegatron.comm.axis import Axis
from minimegatron.errors import CheckpointError


class RegionSavePlanner(DefaultSavePlanner):
    """torch's planner; a table of `Logical` in, no nesting."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].region(index)


class RegionLoadPlanner(LoadPlanner):
    """Each rank plans for itself: what it wants is its own affair, and every file is there for all."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.tensors: dict[str, Logical] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, tensor in self.tensors.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, tensor.__create_chunk_list__())
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.tensors[read_item.dest_index.fqn].region(read_item.dest_index)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint of ours has tensors only")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise AssertionError("a checkpoint of ours has tensors only")


def write_tensors(tensors: Mapping[str, Logical], writer: ShardWriter, axis: Axis) -> None:
    """Write and publish; all ranks of the axis call, each with its regions of the same names.

    Raises:
        CheckpointError: on every rank: what the first rank that failed has met.
    """
    table, planner = dict(tensors), RegionSavePlanner()
    with _as_ours():
        if axis.size > 1:
            dcp.save(table, storage_writer=writer, planner=planner, process_group=axis.group)
            return
        planner.set_up_planner(table, None, True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        (plan,) = writer.prepare_global_plan(plans)
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).value()])


def read_tensors(tensors: Mapping[str, Logical], reader: ShardReader, axis: Axis) -> None:
    """Fill the regions that are here; all ranks of the axis call.

    Raises:
        CheckpointError: on every rank.
    """
    table, planner = dict(tensors), RegionLoadPlanner()
    with _as_ours():
        if axis.size > 1:
            dcp.load(table, storage_reader=reader, planner=planner, process_group=axis.group)
            return
        metadata = reader.read_metadata()
        planner.set_up_planner(table, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        reader.read_data(planner.create_local_plan(), planner)


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    """torch collects what each rank has raised; say the first."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        if isinstance(first, CheckpointError):
            raise CheckpointError(first.what, where=f"rank {rank}: {first.where}", fix=first.fix) from error
        raise CheckpointError(f"{type(first).__name__}: {first}", where=f"rank {rank}") from error
