"""Where torch.distributed.checkpoint writes and reads: our shards and our manifest in place of its pickles.

The problem in a sentence: torch's planner knows who writes which of the copies and which stored box meets which wanted
one, and its file format would run code on load, miss a flipped byte and mix two saves in one folder.

So the planner stays, and the two ends of it are ours, through the interface that it offers:

    planner of torch  --write items-->  ShardWriter  --> shard-00000-of-00004.safetensors, manifest.json
    planner           <--tensors------  ShardReader  <-- the same              (checkpoint/planning.py)

`torch.distributed.checkpoint` also gathers the outcome of all ranks before `finish`, so a full disk on one of them ends
the save on all before anything is published.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html (`StorageWriter`, `StorageReader`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from minimegatron.checkpoint.commit import OLDER, publish, verify_hash, verify_header
from minimegatron.checkpoint.disk import UNREADABLE, disk, write_durable
from minimegatron.checkpoint.manifest import Manifest, Stored, StoredTensor
from minimegatron.checkpoint.shard_file import (
    DTYPES,
    Entry,
    HashedFile,
    bytes_of,
    is_plain,
    read_header,
    read_tensor,
    write_shard,
)
from minimegatron.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_Wanted = list[tuple[ReadItem, Stored]]  # of one stored region


@dataclasses.dataclass(frozen=True)
class _Written:
    file: str
    key: str
    size: int
    digest: str


class ShardWriter(StorageWriter):
    """One file a rank, and the manifest.

    Args:
        staged: a staging folder that all ranks see.
        root: where `finish` publishes it.
        step, run_id, state: of the manifest; `state` is rank 0's.
    """

    def __init__(self, staged: Path, root: Path, step: int, run_id: str, state: Mapping[str, Any]) -> None:
        self.staged, self.root = staged, root
        self.step, self.run_id, self.state = step, run_id, dict(state)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"shard-{rank:05d}-of-{len(plans):05d}.safetensors" for rank in range(len(plans))]
        return [dataclasses.replace(p, storage_data=name) for p, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {_key(item.index): item for item in plan.items}
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        if not items:
            return done
        tensors: dict[str, Any] = {key: planner.resolve_data(item) for key, item in items.items()}
        metadata = {"step": str(self.step), "run_id": self.run_id}
        size, digest = write_durable(
            self.staged / plan.storage_data,
            sum(tensor.nbytes for tensor in tensors.values()),
            lambda file: write_shard(file, tensors, metadata),
        )
        done = Future()
        done.set_result(
            [
                WriteResult(item.index, item.tensor_storage_size() or 0, _Written(plan.storage_data, key, size, digest))
                for key, item in items.items()
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            regions = tuple(
                Stored(tuple(chunk.offsets), tuple(chunk.sizes), written.file, written.key)
                for chunk in stored.chunks
                for written in [where[MetadataIndex(name, chunk.offsets)]]
            )
            tensors[name] = StoredTensor(_NAMES[stored.properties.dtype], tuple(stored.size), regions)
        files = {written.file: (written.size, written.digest) for written in where.values()}
        publish(self.staged, self.root, Manifest(self.step, self.run_id, files, tensors, self.state))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(StorageReader):
    """Regions from the files of a checkpoint.

    Args:
        folder: of a checkpoint.
        manifest: what is in it.
        hashed: names of files that are held against their hashes while they are read, wanted or not.
    """

    def __init__(self, folder: Path, manifest: Manifest, hashed: Collection[str] = ()) -> None:
        self.folder, self.manifest, self.hashed = folder, manifest, hashed
        self._headers: dict[str, dict[str, Entry]] = {}
        self._memory = bytearray()  # what is read lies here until it is copied: new pages cost more than the reading

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[t.dtype]),
                torch.Size(t.shape),
                [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in t.regions],
            )
            for name, t in self.manifest.tensors.items()
        }
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored = {(n, r.offsets): r for n, t in self.manifest.tensors.items() for r in t.regions}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, dict[str, _Wanted]] = {}  # by file and key: a region is read once
        for item in plan.items:
            assert item.storage_index.offset is not None
            stored = self._stored[item.storage_index.fqn, tuple(item.storage_index.offset)]
            wanted.setdefault(stored.file, {}).setdefault(stored.key, []).append((item, stored))
        for name in dict.fromkeys([*self.hashed, *wanted]):
            self._read(name, list(wanted.get(name, {}).values()), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str, wanted: list[_Wanted], planner: LoadPlanner) -> None:
        """Read what is wanted of a file; from its beginning to its end if it is to be hashed."""
        path, hashed = self.folder / name, name in self.hashed
        if hashed:
            verify_header(self.folder, self.manifest, name)
        with disk(path, UNREADABLE), path.open("rb") as opened:
            file = HashedFile(opened) if hashed else opened
            for entry, items in sorted(((self._entry(*of[0]), of) for of in wanted), key=lambda pair: pair[0].start):
                self._fill(file, entry, items, planner)
            if isinstance(file, HashedFile):
                file.seek(self.manifest.files[name][0])
                verify_hash(self.folder, self.manifest, name, (file.at, file.sha256()))

    def _fill(self, file: BufferedReader | HashedFile, entry: Entry, items: _Wanted, planner: LoadPlanner) -> None:
        """Read one stored region, and put it where it is wanted."""
        targets = [planner.resolve_tensor(item).detach() for item, _ in items]
        as_it_is = len(items) == 1 and targets[0].shape == entry.shape and targets[0].dtype == entry.dtype
        if as_it_is and is_plain(targets[0]):
            read_tensor(file, entry, bytes_of(targets[0]))
        else:
            tensor = self._region(file, entry)
            for (item, _), target in zip(items, targets, strict=True):
                part = tensor
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target.copy_(part)
        for (item, _), target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def whole(self, name: str) -> torch.Tensor:
        """A logical tensor, put together from its regions."""
        described = self.manifest.tensors[name]
        found = torch.empty(described.shape, dtype=DTYPES[described.dtype])
        for stored in described.regions:
            path = self.folder / stored.file
            with disk(path, UNREADABLE), path.open("rb") as file:
                where = tuple(slice(o, o + n) for o, n in zip(stored.offsets, stored.sizes, strict=True))
                found[where] = self._region(file, self._entry_of(name, stored))
        return found

    def _entry(self, item: ReadItem, stored: Stored) -> Entry:
        return self._entry_of(item.storage_index.fqn, stored)

    def _entry_of(self, name: str, stored: Stored) -> Entry:
        """What a file has under the key of a region, if that is what the manifest says."""
        if stored.file not in self._headers:
            self._headers[stored.file] = read_header(self.folder / stored.file)[0]
        entry = self._headers[stored.file].get(stored.key)
        there = None if entry is None else (entry.dtype, entry.shape)
        said = (DTYPES[self.manifest.tensors[name].dtype], stored.sizes)
        if entry is None or there != said:
            raise CheckpointError(
                f"holds {there} under {stored.key}, the manifest says {said}",
                where=str(self.folder / stored.file),
                fix=OLDER,
            )
        return entry

    def _region(self, file: BufferedReader | HashedFile, entry: Entry) -> torch.Tensor:
        """Its numbers, until the next call."""
        if len(self._memory) < entry.stop - entry.start:
            self._memory = bytearray(entry.stop - entry.start)
        return read_tensor(file, entry, self._memory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(index: MetadataIndex) -> str:
    assert index.offset is not None
    return f"{index.fqn}@{'_'.join(map(str, index.offset))}"
