"""The files of Megatron's `.bin/.idx` dataset: their bytes, and what is refused before they are trusted.

Token ids of all sequences lie back to back in `prefix.bin`; `prefix.idx` says where each one starts::

    offset  bytes         meaning
    0       9             magic  "MMIDIDX\\0\\0"
    9       8   u64       version = 1
    17      1   u8        dtype code: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16
    18      8   u64       S, number of sequences
    26      8   u64       D, number of document boundaries (documents + 1)
    34      4*S i32       tokens of each sequence
    ...     8*S i64       byte offset of each sequence in .bin
    ...     8*D i64       first sequence of each document, and S at the end

Everything is little-endian. A document usually is one sequence. The format has no checksum: a flipped byte in `.bin`
is just another token. So our builder also writes `prefix.json`, the *sidecar*, with the SHA-256 and size of both files,
the largest id and the tokenizer; Megatron ignores it, and its own datasets have none.

| check           | refuses                                                                                        |
|-----------------|------------------------------------------------------------------------------------------------|
| `read_index`    | a header or a size of `.idx` that is not this format                                           |
| `check_index`   | lengths, offsets and boundaries that contradict each other, or the size of `.bin`              |
| `read_sidecar`  | a size or hash that is not the one that was written                                            |

An error names the file and the byte.

In Megatron-LM: `_IndexReader` and `_IndexWriter` in `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Any, NamedTuple

import numpy as np

from minimegatron.data.publish import read_json, sha256_of
from minimegatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODE_OF_DTYPE = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DTYPE_OF_CODE = {code: np.dtype(name).newbyteorder("<") for name, code in CODE_OF_DTYPE.items()}
SIDECAR_FORMAT = "minimegatron-indexed-1"


class Index(NamedTuple):
    """The contents of an `.idx` file.

    Attributes:
        dtype: dtype of the ids in `.bin`.
        lengths: [S] int32, tokens.
        pointers: [S] int64, bytes.
        boundaries: [D] int64, sequences.
        sha256: hex digest of the file.
    """

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    boundaries: np.ndarray
    sha256: str


def pack_index(dtype: np.dtype, lengths: np.ndarray, boundaries: np.ndarray) -> list[bytes | memoryview]:
    """The `.idx` file of sequences of these lengths, in pieces to be written one after the other."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    arrays = ((lengths, "<i4"), (pointers, "<i8"), (boundaries, "<i8"))
    header = HEADER.pack(MAGIC, 1, CODE_OF_DTYPE[dtype.name], len(lengths), len(boundaries))
    return [header, *(np.ascontiguousarray(array, dtype=little).data.cast("B") for array, little in arrays)]


def read_index(path: str) -> Index:
    """Map an `.idx` file.

    Raises:
        DataError: magic, version, dtype code or size are wrong, or there is no sequence; names the byte.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _damaged(path, len(header), f"ends inside its header of {HEADER.size} bytes")
    magic, version, code, sequences, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise _damaged(path, 0, f"magic is {magic!r}, not {MAGIC!r}")
    if version == 1 << 56:
        raise _damaged(path, 9, "written by a big-endian program")
    if version != 1:
        raise _damaged(path, 9, f"version is {version}, not 1")
    if code not in DTYPE_OF_CODE:
        raise _damaged(path, 17, f"dtype code is {code}, not one of {sorted(DTYPE_OF_CODE)}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size == expected + sequences:
        raise _damaged(path, expected, "a multimodal dataset (one mode byte a sequence), which is not supported")
    if size != expected:
        what = f"{sequences} sequences and {boundaries} boundaries need {expected} bytes, the file has {size}"
        raise _damaged(path, min(expected, size), what)
    if sequences == 0 or boundaries == 0:
        raise _damaged(path, 18, f"{sequences} sequences and {boundaries} document boundaries: no token")
    index = memoryview(np.memmap(path, mode="r"))  # type: ignore[arg-type]
    return Index(
        DTYPE_OF_CODE[code],
        np.frombuffer(index, "<i4", sequences, HEADER.size),
        np.frombuffer(index, "<i8", sequences, _at_pointer(sequences, 0)),
        np.frombuffer(index, "<i8", boundaries, _at_boundary(sequences, 0)),
        hashlib.sha256(index).hexdigest(),
    )


def check_index(index: Index, idx_path: str, bin_path: str) -> None:
    """Refuse an index that contradicts itself or the size of `.bin`.

    Raises:
        DataError: a length below 1, an offset that is not the running sum of the lengths, boundaries that do not
            ascend from 0 to S, or a `.bin` that is longer or shorter than the lengths say; names the byte.
    """
    lengths, pointers, boundaries = index.lengths, index.pointers, index.boundaries
    count = len(lengths)
    if (bad := _first(lengths < 1)) is not None:
        raise _damaged(idx_path, HEADER.size + 4 * bad, f"sequence {bad} has {lengths[bad]} tokens")
    ends = np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
    starts = np.concatenate(([0], ends[:-1]))
    if (bad := _first(pointers != starts)) is not None:
        what = f"sequence {bad} starts at byte {pointers[bad]} of .bin, but the lengths say {starts[bad]}"
        raise _damaged(idx_path, _at_pointer(count, bad), what)
    size = os.path.getsize(bin_path)
    if ends[-1] != size:
        fix = "it is torn, or belongs to another index; preprocess again"
        where = f"{bin_path}, byte {min(int(ends[-1]), size)}"
        raise DataError(f"the index describes {ends[-1]} bytes, the file has {size}", where=where, fix=fix)
    if boundaries[0] != 0:
        raise _damaged(idx_path, _at_boundary(count, 0), f"the first document starts at sequence {boundaries[0]}")
    if (bad := _first(boundaries[1:] < boundaries[:-1])) is not None:
        raise _damaged(idx_path, _at_boundary(count, bad + 1), f"document {bad + 1} starts before document {bad}")
    if boundaries[-1] != count:
        what = f"the last boundary is {boundaries[-1]}, not the number of sequences {count}"
        raise _damaged(idx_path, _at_boundary(count, len(boundaries) - 1), what)


def read_sidecar(path: str, index: Index, idx_path: str, bin_path: str, verify: bool) -> dict[str, Any] | None:
    """The sidecar, when there is one, after comparing both files with it; `.bin` is hashed only when `verify`.

    Raises:
        DataError: a size or hash differs, or the sidecar is none.
    """
    if not os.path.isfile(path):
        return None
    sidecar = read_json(path)
    try:
        entries = [(idx_path, sidecar["idx"]["bytes"], sidecar["idx"]["sha256"], index.sha256)]
        entries.append((bin_path, sidecar["bin"]["bytes"], sidecar["bin"]["sha256"], ""))
        readable = sidecar["format"] == SIDECAR_FORMAT and isinstance(sidecar["max_id"], int)
    except (KeyError, TypeError):
        readable = False
    if not readable:
        raise DataError("not a sidecar of this version", where=path, fix="delete it, or preprocess again")
    for file, size, expected, known in entries:
        found = os.path.getsize(file)
        if found != size:
            raise DataError(
                f"{found} bytes, but {path} says {size}",
                where=f"{file}, byte {min(found, size)}",
                fix="copy both files again, or preprocess again",
            )
        if (known or verify) and (known or sha256_of(file)) != expected:
            fix = f"it changed after it was written: copy it again, preprocess again, or delete {path} to trust it"
            raise DataError(f"its SHA-256 is not the one in {path}", where=f"{file}, bytes 0 to {size}", fix=fix)
    return sidecar


def _at_pointer(sequences: int, i: int) -> int:
    return HEADER.size + 4 * sequences + 8 * i


def _at_boundary(sequences: int, i: int) -> int:
    return HEADER.size + 12 * sequences + 8 * i


def _first(bad: np.ndarray) -> int | None:
    """Index of the first True, or None."""
    return int(np.argmax(bad)) if bad.any() else None


def _damaged(path: str, offset: int, what: str) -> DataError:
    fix = "the index is damaged, or not one of Megatron's; preprocess again"
    return DataError(what, where=f"{path}, byte {offset}", fix=fix)
