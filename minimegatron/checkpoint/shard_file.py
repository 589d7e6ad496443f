"""Reads and writes safetensors files: the header is checked before a tensor is read, and writing hashes the file.

The problem in a sentence: the file may be damaged or malicious, so every number in its header is checked against the
others and against the length of the file.

    8 bytes      length of the header, little endian
    header       {"__metadata__": {"step": "20", "run_id": "..."}, "name": {"dtype": "F32", "shape": [2, 3],
                  "data_offsets": [0, 24]}, ...}, JSON
    the rest     the tensors, one after the other, without a gap

| limit                         | value      | because                                                                 |
|-------------------------------|------------|-------------------------------------------------------------------------|
| header                        | 16 MiB     | it is read whole, before anything is known                              |
| tensors                       | 100,000    | each becomes an object                                                  |
| dims of a tensor              | 8          | nothing here has more                                                   |
| elements                      | product    | in Python's integers, which do not overflow                             |
| offsets                       | tile       | no byte twice, none left over, the last at the end of the file          |

Files are not mapped into memory: a file that is replaced under a mapping ends the process with SIGBUS. The library
`safetensors` reads the same files; tests use it to read ours.

The hash is XXH3 with 128 bits: 15 GB/s on a core where SHA-256, with the processor's instructions for it, has 1.8. It
is for damage that happens by accident. It stops nobody who changes a file on purpose, and SHA-256 did not either:
whoever can write a shard can write the manifest with its hash. Files of older manifests are hashed with SHA-256, as
those say.

https://github.com/huggingface/safetensors (the format); https://github.com/Cyan4973/xxHash (the hash).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
import os
import struct
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash

from minimegatron.errors import CheckpointError

MAX_HEADER, MAX_TENSORS, MAX_DIMS = 16 << 20, 100_000, 8
CHUNK = 1 << 19  # bytes that are hashed while the processor still has them in its cache from reading or writing
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HASHES: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
HASH = "xxh3_128"  # of what is written


class Entry(NamedTuple):
    """A tensor of a file: its dtype, shape, and bytes [start, stop) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_shard(
    file: BinaryIO,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
    read: Callable[[str], torch.Tensor] | None = None,
) -> tuple[int, str]:
    """Write a safetensors file.

    Args:
        file: open for writing, at its start.
        tensors: by name; each is copied to the CPU as it is written.
        metadata: for the header.
        read: name -> values of a tensor, called as it is written; then only dtype and shape of `tensors` are used.

    Returns:
        Its length in bytes and its hash, as `HashedFile.hash` gives it.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER or len(tensors) > MAX_TENSORS:
        raise CheckpointError(
            f"{len(tensors)} tensors, a header of {len(text)} bytes: no reader would take the file",
            where=str(getattr(file, "name", "")),
            fix=f"more ranks: a file holds {MAX_TENSORS} tensors and {MAX_HEADER >> 20} MiB of header",
        )
    digest, length = HASHES[HASH](), 0
    numbers = (bytes_of(tensor if read is None else read(name)) for name, tensor in tensors.items())
    for block in itertools.chain([memoryview(struct.pack("<Q", len(text)) + text)], numbers):
        for start in range(0, len(block), CHUNK):
            piece = block[start : start + CHUNK]
            file.write(piece)
            digest.update(piece)
        length += len(block)
    assert length == 8 + len(text) + at, "a tensor was read that is not as large as was said"
    return length, f"{HASH}:{digest.hexdigest()}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are contiguous in the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory if it is plain, else that of a copy."""
    plain = tensor.detach().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # one number has any stride and is contiguous
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file and its metadata.

    Raises:
        CheckpointError: it is no safetensors file, or its header contradicts itself or the file's length.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise _Bad(f"has {total} bytes, not even the length of a header")
            (length,) = struct.unpack("<Q", start)
            if length > min(MAX_HEADER, total - 8):
                raise _Bad(f"claims a header of {length} bytes; the file has {total}, the limit is {MAX_HEADER}")
            return _parse(file.read(length), 8 + length, total)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except _Bad as error:
        raise CheckpointError(
            f"this is no safetensors file as it should be: it {error}",
            where=str(path),
            fix="take another copy of the checkpoint, or an older one",
        ) from None


class _Bad(ValueError):
    pass


def _parse(text: bytes, data_starts: int, total: int) -> tuple[dict[str, Entry], dict[str, str]]:
    if (count := text.count(b'"dtype"')) > MAX_TENSORS:
        raise _Bad(f"lists {count} tensors; the limit is {MAX_TENSORS}")
    try:
        header = json.loads(text, object_pairs_hook=_table)
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, _Bad) else _Bad(f"has a header that is no JSON: {str(error)[:80]}") from None
    if not isinstance(header, dict):
        raise _Bad("has a header that is no table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Bad("has metadata that are no table of texts")
    entries = {name: _entry(repr(name[:80]), value, data_starts) for name, value in header.items()}
    at = data_starts
    for entry in sorted(entries.values(), key=operator.attrgetter("start", "stop")):
        if entry.start != at:
            raise _Bad(f"has a gap or an overlap at byte {min(at, entry.start)}")
        at = entry.stop
    if at != total:
        raise _Bad(f"should have {at} bytes by its header and has {total}")
    return entries, metadata


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise _Bad("names something twice")
    return table


def _entry(name: str, value: Any, data_starts: int) -> Entry:
    """One entry of the header, checked."""
    fields = value if isinstance(value, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise _Bad(f"describes {name} without a shape and offsets in whole numbers")
    if not all(type(i) is int and 0 <= i < 1 << 62 for i in [*shape, *offsets]):
        raise _Bad(f"describes {name} without a shape and offsets in whole numbers")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields.get("dtype"), str) else None
    if dtype is None:
        raise _Bad(f"gives {name} the unknown dtype {str(fields.get('dtype'))[:20]!r}")
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise _Bad(f"gives {name} {len(shape)} dims and {len(offsets)} offsets")
    start, stop = offsets
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise _Bad(f"gives {name} of shape {shape[:8]} {stop - start} bytes")
    return Entry(dtype, tuple(shape), data_starts + start, data_starts + stop)


class HashedFile:
    """A file that is read once from beginning to end and hashed while it is read.

    Args:
        file: open, at its beginning.
        kind: of the hash, a key of `HASHES`.

    Attributes:
        at: bytes read so far.
    """

    def __init__(self, file: BufferedReader, kind: str = HASH) -> None:
        self.name, self.at, self.kind = str(file.name), 0, kind
        self._file, self._digest = file, HASHES[kind]()
        self._skipped = memoryview(bytearray(CHUNK))

    def seek(self, to: int) -> None:
        """Skip to this offset; the bytes in between are read for the hash."""
        assert to >= self.at, "a file is hashed from its beginning to its end"
        while self.at < to and self.readinto(self._skipped[: to - self.at]):
            pass

    def readinto(self, memory: memoryview) -> int:
        """Fill memory; reads fewer bytes only at the end of the file."""
        done = 0
        while count := self._file.readinto(memory[done : done + CHUNK]):
            self._digest.update(memory[done : done + count])
            done += count
        self.at += done
        return done

    def hash(self) -> str:
        """The hash of all bytes read, `kind:digits`; of SHA-256 the digits alone, as older manifests have it."""
        digits = self._digest.hexdigest()
        return digits if self.kind == "sha256" else f"{self.kind}:{digits}"


def read_tensor(
    file: BufferedReader | HashedFile, entry: Entry, memory: bytearray | memoryview | None = None
) -> torch.Tensor:
    """A tensor of an open file, in memory of its own, or in the first bytes of `memory`."""
    size = entry.stop - entry.start
    buffer = memoryview(bytearray(size) if memory is None else memory)[:size]
    file.seek(entry.start)
    if file.readinto(buffer) != len(buffer):
        raise CheckpointError("the file ends before the tensor does", where=str(getattr(file, "name", "")))
    if not buffer:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(entry.dtype).view(entry.shape)


def kind_of(stated: str) -> str:
    """The kind of a hash that a manifest states: what stands before the colon, else SHA-256."""
    return stated.partition(":")[0] if ":" in stated else "sha256"


def hash_of(path: Path, kind: str = HASH) -> tuple[int, str]:
    """Length and hash of a file."""
    with path.open("rb") as file:
        hashed = HashedFile(file, kind)
        hashed.seek(os.fstat(file.fileno()).st_size)
    return hashed.at, hashed.hash()
