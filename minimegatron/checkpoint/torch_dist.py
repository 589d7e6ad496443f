"""The files of Megatron's checkpoints (`torch_dist`): read without executing anything in them, and written.

    iter_0000010/
      metadata.json          {"sharded_backend": "torch_dist", ...}
      .metadata              a pickle: every tensor, its chunks, and where each lies   (`checkpoint/pickled`)
      __0_0.distcp, ...      a `torch.save` archive for each chunk, one after the other: a zip of a pickle and numbers
      common.pt              what all ranks share, a pickle: `args`, `iteration`

A chunk's archive is not compressed, so its numbers lie in the file as they are: a small pickle gives dtype, shape and
strides, and then any box of the chunk is read as from a safetensors file.

The format is torch.distributed.checkpoint's. Megatron-LM: `megatron/core/dist_checkpointing/strategies/torch.py`.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from minimegatron.checkpoint.disk import files_in, staged
from minimegatron.checkpoint.pickled import Built, read_pickle
from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.shard_file import Entry
from minimegatron.checkpoint.sources import (
    Described,
    Source,
    assemble,
    elements,
    inside,
    intersection,
    matrices,
    read_box,
    whole,
)
from minimegatron.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
_FILE = re.compile(r"[A-Za-z0-9_]+\.distcp")
_MOST = 1 << 30  # bytes of a pickle
_DCP = "torch.distributed.checkpoint."
_KNOWN = {
    *(f"{_DCP}metadata.{name}" for name in "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
      "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING".split()),
    *(f"{_DCP}planner.{name}" for name in "SavePlan WriteItem WriteItemType TensorWriteData".split()),
    f"{_DCP}filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath",
    "collections.OrderedDict",
}  # fmt: skip
_DTYPES = {
    f"torch.{n}": getattr(torch, n)
    for n in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2".split()
}
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
_IN_CHUNK = {*_STORAGES, "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"}


def find(folder: Path, step: int | None = None) -> Path | None:
    """The folder of a checkpoint of Megatron's: this one, or one inside of it; None if there is none."""
    if (folder / ".metadata").is_file():
        return folder
    latest = folder / LATEST
    if not latest.is_file():
        return None
    step_name = f"{step}" if step is not None else latest.read_text()[:40].strip()
    candidate = folder / (
        step_name if step_name == "release" else f"iter_{int(step_name):07d}" if step_name.isdigit() else ""
    )
    return candidate if candidate != folder and (candidate / ".metadata").is_file() else None


class TorchDist:
    """The tensors of a checkpoint of Megatron's, by its names.

    Args:
        folder: with `.metadata`.

    Attributes:
        objects: names of entries that are stored as bytes (`_extra_state`): never read.

    Raises:
        CheckpointError: it is broken, or its metadata has names that do not belong there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / ".metadata"
        if path.stat().st_size > _MOST:
            raise CheckpointError(f"has {path.stat().st_size:,} bytes", where=str(path))
        metadata = read_pickle(path.read_bytes(), str(path), lambda name: name in _KNOWN or name in _DTYPES)
        try:
            self._take(metadata)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise CheckpointError(f"the metadata lack something: {error}", where=str(path)) from None
        self._entries: dict[tuple[str, tuple[int, ...]], Entry] = {}

    def _take(self, metadata: Any) -> None:
        storage_of = {
            (index["fqn"], _offset(index.state.get("offset"))): info for index, info in metadata["storage_data"].items()
        }
        self.tensors: dict[str, Described] = {}
        self.objects: list[str] = []
        self._chunks: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], Path, int, int]]] = {}
        for name, stored in metadata["state_dict_metadata"].items():
            if stored.name.endswith("BytesStorageMetadata"):
                self.objects.append(name)
                continue
            properties = stored["properties"].state  # written by __getstate__: a tuple, or a table of fields
            dtype = _DTYPES[str(properties["dtype"] if isinstance(properties, dict) else properties[0])]
            shape = _size(stored["size"])
            self.tensors[name] = Described(dtype, shape)
            chunks = self._chunks[name] = {}
            for chunk in stored["chunks"]:
                offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
                info = storage_of[name, offsets]
                file = str(info["relative_path"])
                outside = any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True))
                if not _FILE.fullmatch(file) or outside or info.state.get("transform_descriptors"):
                    raise ValueError(f"a chunk of {name}")
                chunks[offsets] = sizes, self.folder / file, int(info["offset"]), int(info["length"])

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        boxes = {
            offsets: tuple((o, o + n) for o, n in zip(offsets, sizes, strict=True))
            for offsets, (sizes, _, _, _) in self._chunks[name].items()
        }
        wanted = whole(self.tensors[name].shape) if box is None else box
        shares = [common for chunk in boxes.values() if (common := intersection(chunk, wanted)) is not None]
        if sum(map(elements, shares)) != elements(wanted):
            raise CheckpointError(f"the chunks of {name} do not fill it", where=str(self.folder / ".metadata"))

        def read(offsets: tuple[int, ...], part: Sequence[tuple[int, int]]) -> torch.Tensor:
            return read_box(self._chunks[name][offsets][1], self._entry(name, offsets), inside(part, boxes[offsets]))

        return assemble(self.tensors[name], wanted, [(boxes[at], partial(read, at)) for at in boxes])

    def _entry(self, name: str, offsets: tuple[int, ...]) -> Entry:
        """The bytes of a chunk in its file."""
        if (name, offsets) not in self._entries:
            sizes, path, start, length = self._chunks[name][offsets]
            try:
                self._entries[name, offsets] = _open_chunk(path, start, length, self.tensors[name].dtype, sizes)
            except (OSError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile) as error:
                raise CheckpointError(
                    f"the chunk of {name} at byte {start} is not what the metadata say: {error}",
                    where=str(path),
                    fix="take another copy of the checkpoint",
                ) from None
        return self._entries[name, offsets]


def _size(built: Any) -> tuple[int, ...]:
    """The numbers of a `torch.Size`."""
    if not isinstance(built, Built) or built.name != "torch.Size":
        raise ValueError("a size is none")
    numbers = tuple(built.args[0])
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("a size has no whole numbers")
    return numbers


def _offset(built: Any) -> tuple[int, ...]:
    return () if built is None else _size(built)


class _Part(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _open_chunk(path: Path, start: int, length: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Entry:
    """Read the pickle of an archive and locate its numbers."""
    with path.open("rb") as file, zipfile.ZipFile(_Part(file, start, length)) as archive:  # type: ignore[arg-type]
        by_name = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if by_name["data.pkl"].file_size > 1 << 16 or archive.read(by_name["byteorder"]) != b"little":
            raise ValueError("it is no archive of one tensor, written here")
        built = read_pickle(archive.read(by_name["data.pkl"]), str(path), lambda name: name in _IN_CHUNK)
        if built.name != "torch._utils._rebuild_tensor_v2":
            raise ValueError("it holds no tensor")
        storage, at, shape, strides = built.args[:4]
        kind, key = storage.args[0][1:3]
        numbers = by_name[f"data/{key}"]
        if numbers.compress_type != zipfile.ZIP_STORED or _STORAGES[str(kind)] != dtype or tuple(shape) != sizes:
            raise ValueError(f"it holds {kind} {shape}")
        if tuple(strides) != torch.empty(shape, device="meta").stride() and math.prod(shape) > 1:
            raise ValueError(f"its strides are {strides}")
        file.seek(start + numbers.header_offset + 26)
        names, extra = int.from_bytes(file.read(2), "little"), int.from_bytes(file.read(2), "little")
        begin = start + numbers.header_offset + 30 + names + extra + at * dtype.itemsize
        end = begin + math.prod(shape) * dtype.itemsize
        if (
            type(at) is not int
            or at < 0
            or end > start + numbers.header_offset + 30 + names + extra + numbers.file_size
        ):
            raise ValueError("its numbers lie outside of it")
        return Entry(dtype, sizes, begin, end)


def read_common(folder: Path) -> dict[str, Any]:
    """`common.pt`, `args` as a table; {} if there is none. Values that are no plain data are names, or `Built`."""
    path = folder / "common.pt"
    if not path.is_file():
        return {}
    try:
        content = read_pickle(_in_archive(path, "/data.pkl", _MOST), str(path))
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path)) from None
    common = dict(content) if isinstance(content, dict) else {}
    args = common.pop("args", None)
    return common | ({"args": args.state} if isinstance(args, Built) and isinstance(args.state, dict) else {})


def read_number(folder: Path, value: Any) -> float:
    """A number of `common.pt`; if it is a tensor, its bytes are beside the pickle.

    Raises:
        ValueError: it is no number.
    """
    if type(value) in (int, float):
        return float(value)
    try:
        storage, at, shape = value.args[:3]
        kind, key = storage.args[0][1:3]
        numbers = _in_archive(folder / "common.pt", f"/data/{key}", 1 << 16)
        if value.name != "torch._utils._rebuild_tensor_v2" or math.prod(shape) != 1 or type(at) is not int:
            raise ValueError("it is no tensor of one element")
        return float(torch.frombuffer(bytearray(numbers), dtype=_STORAGES[str(kind)])[at])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, zipfile.BadZipFile) as error:
        raise ValueError(f"a number of common.pt is {str(value)[:60]}: {error}") from None


def _in_archive(path: Path, end: str, most: int) -> bytes:
    """The member of an archive whose name has this end."""
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(end))
        if info.file_size > most or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} has {info.file_size:,} bytes")
        return archive.read(info)


# ---------------------------------------------------------------------------------------------------- writing


def write_release(source: Source, args: Mapping[str, Any], objects: Iterable[str], root: Path) -> list[str]:
    """Write a folder that `--load ROOT` of Megatron reads: weights only, no iteration; returns the names of the files.

    Raises:
        CheckpointError: the folder exists.
    """
    with staged(root) as hidden:
        write_torch_dist(source, args, objects, hidden / "release")
        (hidden / LATEST).write_text("release")
    return files_in(root)


def write_torch_dist(source: Source, args: Mapping[str, Any], objects: Iterable[str], folder: Path) -> None:
    """Write a checkpoint that Megatron loads; a tensor of a stack is a chunk.

    Args:
        source: tensors under Megatron's names.
        args: those of `common.pt`.
        objects: names under which Megatron expects an object, which is None.
        folder: `iter_0000010` or `release`; its parent exists.
    """
    # With all that it imports, half a second of a CPU: whoever trains would wait for it.
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    state: dict[str, Any] = {}
    where: dict[dcp.MetadataIndex, _StorageInfo] = {}
    with (folder / "__0_0.distcp").open("xb") as file:
        for name, (dtype, shape) in source.tensors.items():
            chunks = []
            for box in matrices(shape):
                offsets, sizes = torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box)
                start = file.tell()
                torch.save(source.read(name, box).contiguous().clone(), file)
                where[dcp.MetadataIndex(name, offsets)] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
                chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            state[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for name in objects:
            start = file.tell()
            torch.save([None], file)  # a list of the objects with this name
            where[dcp.MetadataIndex(name)] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
            state[name] = dcp.BytesStorageMetadata()
    with (folder / ".metadata").open("xb") as file:
        pickle.dump(dcp.Metadata(state, planner_data=None, storage_data=where), file)
    torch.save({"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    text = json.dumps({**backend, "common_backend": "torch", "common_backend_version": 1})
    (folder / "metadata.json").write_text(text)
