"""Reads the tensors of a checkpoint: the regions that each rank needs, or any box of one tensor.

The problem in a sentence: a run in another layout needs other boxes than those that were written.

A box consists of its intersections with the boxes that were written. Each rank finds its own from the
manifest, without a message; every stored region is read once, file by file, from its beginning to its end. Files that
are to be verified are hashed while they are read, even if the rank needs none of their regions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

import torch

from minimegatron.checkpoint.commit import OLDER, verify_hash, verify_header
from minimegatron.checkpoint.disk import UNREADABLE, disk
from minimegatron.checkpoint.manifest import Manifest, Stored
from minimegatron.checkpoint.regions import Box, Logical, Region
from minimegatron.checkpoint.shard_file import (
    DTYPES,
    Entry,
    HashedFile,
    bytes_of,
    is_plain,
    kind_of,
    read_header,
    read_tensor,
)
from minimegatron.checkpoint.sources import Described, assemble, inside, intersection, read_box, slices
from minimegatron.comm.agree import on_all_ranks
from minimegatron.comm.axis import Axis
from minimegatron.errors import CheckpointError


class CheckpointFiles:
    """The tensors of a checkpoint; a `Source` (`checkpoint/sources`).

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.tensors = {name: Described(DTYPES[t.dtype], t.shape) for name, t in manifest.tensors.items()}
        self._headers: dict[str, dict[str, Entry]] = {}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor, default all of it."""
        regions = self.manifest.tensors[name].regions
        return assemble(self.tensors[name], box, [(r.box, partial(self._read_region, name, r)) for r in regions])

    def _read_region(self, name: str, stored: Stored, box: Sequence[tuple[int, int]]) -> torch.Tensor:
        return read_box(self.folder / stored.file, self.entry(name, stored), inside(box, stored.box))

    def entry(self, name: str, stored: Stored) -> Entry:
        """The bytes of a region of a tensor in its file.

        Raises:
            CheckpointError: the file's header contradicts the manifest.
        """
        if stored.file not in self._headers:
            self._headers[stored.file] = read_header(self.folder / stored.file)[0]
        entry = self._headers[stored.file].get(stored.key)
        there = None if entry is None else (entry.dtype, entry.shape)
        expected = (self.tensors[name].dtype, stored.sizes)
        if entry is None or there != expected:
            raise CheckpointError(
                f"holds {there} under {stored.key}, the manifest says {expected}",
                where=str(self.folder / stored.file),
                fix=OLDER,
            )
        return entry


def read_tensors(
    tensors: Mapping[str, Logical], folder: Path, manifest: Manifest, axis: Axis, hashed: Collection[str] = ()
) -> None:
    """Fill the regions of this rank; all ranks of the axis call it.

    Args:
        tensors: by logical name; the manifest has all of them.
        folder, manifest: the checkpoint.
        hashed: names of the files that this rank verifies.

    Raises:
        CheckpointError: a file is damaged; on the rank that read it.
        RankError: on the other ranks.
    """
    on_all_ranks(lambda: _read(tensors, CheckpointFiles(folder, manifest), hashed), axis)


def _read(tensors: Mapping[str, Logical], files: CheckpointFiles, hashed: Collection[str]) -> None:
    wanted: dict[str, list[tuple[str, Stored, list[Region]]]] = {}  # by file; boxes of what is stored
    for name, tensor in tensors.items():
        for stored in files.manifest.tensors[name].regions:
            common = [(part, intersection(stored.box, part.box)) for part in tensor.parts]
            parts = [
                Region(inside(box, stored.box), part.data.detach()[slices(inside(box, part.box))])
                for part, box in common
                if box is not None
            ]
            if parts:
                wanted.setdefault(stored.file, []).append((name, stored, parts))
    memory = bytearray()  # of one region: new pages cost more than the reading
    folder, manifest = files.folder, files.manifest
    for name in dict.fromkeys([*hashed, *wanted]):
        if name in hashed:
            verify_header(folder, manifest, name)
        with disk(folder / name, UNREADABLE), (folder / name).open("rb") as opened:
            file = HashedFile(opened, kind_of(manifest.files[name][1])) if name in hashed else opened
            found = [(files.entry(tensor, stored), parts) for tensor, stored, parts in wanted.get(name, [])]
            for entry, parts in sorted(found, key=lambda pair: pair[0].start):
                if len(memory) < entry.stop - entry.start:
                    memory = bytearray(entry.stop - entry.start)
                _fill(file, entry, parts, memory)
            if isinstance(file, HashedFile):
                file.seek(manifest.files[name][0])
                verify_hash(folder, manifest, name, (file.at, file.hash()))


def _fill(file: BufferedReader | HashedFile, entry: Entry, parts: Sequence[Region], memory: bytearray) -> None:
    """Read one stored region, and copy its boxes to the regions that need them."""
    target = parts[0].data
    if len(parts) == 1 and target.shape == entry.shape and target.dtype == entry.dtype and is_plain(target):
        read_tensor(file, entry, bytes_of(target))
        return
    tensor = read_tensor(file, entry, memory)
    for part in parts:
        part.data.copy_(tensor[slices(part.box)])
