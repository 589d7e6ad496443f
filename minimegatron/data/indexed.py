"""Megatron's `.bin/.idx` dataset, read and written; `index_format` has its bytes.

**Reading** maps both files into memory. On opening, the structure, the sidecar's sizes and the hash of `.idx` are
always checked, the hash of `.bin` when `verify` says so (by default below 1 GiB, where it costs about a second). Ids
outside the vocabulary are refused on opening where that is cheap, else when they are read.

**Writing** checks the range of ids *before* the cast (70,000 as u16 is 4,464, silently), and publishes in an order that
a crash cannot hurt: old `.idx` removed, `.bin` renamed into place, sidecar, new `.idx` last. A dataset without `.idx`
does not exist. Ids are u16 when the vocabulary is below 65,500, else i32.

In Megatron-LM: `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from minimegatron.data.formats import describe
from minimegatron.data.index_format import (
    CODE_OF_DTYPE,
    SIDECAR_FORMAT,
    check_index,
    pack_index,
    read_index,
    read_sidecar,
)
from minimegatron.data.publish import CHUNK, Draft, to_json
from minimegatron.data.tokenizer import Tokenizer
from minimegatron.errors import DataError

VERIFY_BELOW_BYTES = 1 << 30


def optimal_dtype(vocab_size: int) -> np.dtype:
    """The id type that Megatron chooses: u16 for a vocabulary below 65,500, else i32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """Random access to the sequences at `prefix`.

    Args:
        prefix: path without `.bin` and `.idx`.
        verify: hash `.bin` and compare with the sidecar; None means when it is smaller than 1 GiB.
        vocab_size: refuse ids that are not below this; at once if there is a sidecar or `verify`.

    Attributes:
        dtype: of the ids.
        sequence_lengths: [S] int32, tokens.
        sequence_pointers: [S] int64, bytes.
        document_indices: [D] int64, first sequence of each document, and S at the end.
        tokens: [sum of lengths], every id of the file, read-only.
        idx_sha256: hex digest of `.idx`: names the lengths, hence every sample index built on them.
        sidecar: contents of `prefix.json`, or None.

    Raises:
        DataError: a file is missing, damaged, or holds an id outside the vocabulary.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], *, verify: bool | None = None, vocab_size: int | None = None
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.bin_path, self.idx_path = self.prefix + ".bin", self.prefix + ".idx"
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):
                fix = "give the path without .bin/.idx; `minimegatron preprocess` makes both files"
                other = f"; {self.prefix} is {describe(self.prefix)}" if os.path.isfile(self.prefix) else ""
                raise DataError(f"no such file{other}", where=path, fix=fix)
        index = read_index(self.idx_path)
        check_index(index, self.idx_path, self.bin_path)
        verify = os.path.getsize(self.bin_path) < VERIFY_BELOW_BYTES if verify is None else verify
        self.sidecar = read_sidecar(self.prefix + ".json", index, self.idx_path, self.bin_path, verify)
        self.dtype, self.idx_sha256 = index.dtype, index.sha256
        self.sequence_lengths, self.sequence_pointers = index.lengths, index.pointers
        self.document_indices = index.boundaries
        self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)
        if vocab_size is not None and (self.sidecar["max_id"] >= vocab_size if self.sidecar else verify):
            self.check_ids(vocab_size)

    def check_ids(self, vocab_size: int, start: int = 0, stop: int | None = None) -> None:
        """Refuse ids outside [0, vocab_size) among `tokens[start:stop]`.

        Raises:
            DataError: names the file, the byte offset and the value.
        """
        stop = len(self.tokens) if stop is None else stop
        for begin in range(start, stop, CHUNK):
            ids = self.tokens[begin : min(begin + CHUNK, stop)]
            if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                bad = int(np.argmax((ids >= vocab_size) | (ids < 0)))
                raise DataError(
                    f"token id {int(ids[bad])} is outside the vocabulary [0, {vocab_size})",
                    where=f"{self.bin_path}, byte {(begin + bad) * self.dtype.itemsize}",
                    fix="preprocess with the tokenizer that the model is trained with",
                )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int | slice) -> np.ndarray | list[np.ndarray]:
        """One sequence, or the sequences of a slice."""
        if isinstance(idx, slice):
            return [self.get(i) for i in range(*idx.indices(len(self)))]
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sequence {idx} of {len(self)}")
        return self.get(idx % len(self))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of sequence `idx` (to its end when `length` is None), a read-only view.

        Raises:
            DataError: the range leaves the sequence, so that it would read tokens of another one.
        """
        size = int(self.sequence_lengths[idx])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            where = f"{self.prefix}, sequence {idx}"
            raise DataError(
                f"tokens {offset} to {stop} of a sequence of {size}", where=where, fix=f"a range inside [0, {size}]"
            )
        start = int(self.sequence_pointers[idx]) // self.dtype.itemsize
        return self.tokens[start + offset : start + stop]


class IndexedDatasetBuilder:
    """Writes a dataset; nothing is visible before `finalize`, and nothing stays if it is not called.

    Use as a context manager::

        with IndexedDatasetBuilder("corpus.bin", np.uint16) as builder:
            builder.add_document([5, 3, 8], [3])
            builder.finalize("corpus.idx")

    Args:
        bin_path: final path of the `.bin` file.
        dtype: dtype of the ids.
        tokenizer: the tokenizer of the ids; its vocabulary bounds them, and its identity goes into the sidecar.

    Raises:
        DataError: the dtype cannot hold ids, or the folder does not exist.
    """

    def __init__(
        self, bin_path: str | os.PathLike[str], dtype: Any = np.int32, tokenizer: Tokenizer | None = None
    ) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in CODE_OF_DTYPE:
            raise DataError(f"token ids cannot be {self.dtype.name}", fix=f"one of {', '.join(CODE_OF_DTYPE)}")
        self._tokenizer = tokenizer
        self._limit, self._limited_by = int(np.iinfo(self.dtype).max) + 1, self.dtype.name
        if tokenizer is not None and tokenizer.vocab_size < self._limit:
            self._limit, self._limited_by = tokenizer.vocab_size, "the vocabulary"
        self._bin = Draft(bin_path)
        self._lengths = array.array("i")
        self._boundaries = array.array("q", [0])
        self._max_id = 0

    def add_document(self, ids: Any, lengths: Sequence[int]) -> None:
        """Append a document of several sequences.

        Args:
            ids: [sum of lengths] integers, a list, an array or a tensor. A document without any gives a boundary and no
                sequence, as in Megatron.
            lengths: tokens of each of its sequences, each at least 1.

        Raises:
            DataError: not integers, an id that the dtype or the vocabulary cannot hold, or lengths that do not match.
        """
        tokens = np.asarray(ids)
        where = f"{self._bin.path}, sequence {len(self._lengths)}"
        if sum(lengths) != tokens.size or any(length < 1 for length in lengths):
            raise DataError(
                f"{tokens.size} ids for sequences of {list(lengths)} tokens",
                where=where,
                fix="lengths of at least 1 whose sum is the number of ids",
            )
        if tokens.size:
            self._write(tokens, where)
        self._lengths.extend(map(int, lengths))
        self._boundaries.append(len(self._lengths))

    def _write(self, tokens: np.ndarray, where: str) -> None:
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise DataError(
                f"token ids of type {tokens.dtype} and shape {tokens.shape}", where=where, fix="a flat list of integers"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._limit:  # before the cast: it would wrap silently
            bad = int(np.argmax((tokens < 0) | (tokens >= self._limit)))
            what = f"token id {int(tokens[bad])} is outside [0, {self._limit}), the range of {self._limited_by}"
            raise DataError(what, where=f"{where}, token {bad}", fix="use the tokenizer that the ids are of")
        self._max_id = max(self._max_id, int(tokens.max()))
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).data.cast("B"))

    def finalize(self, idx_path: str | os.PathLike[str]) -> None:
        """Publish `.bin`, sidecar and `.idx`, in this order; afterwards the builder is closed.

        Raises:
            DataError: there is no token, or the two paths are no pair.
        """
        prefix, suffix = os.path.splitext(os.path.abspath(idx_path))
        if suffix != ".idx" or self._bin.path != prefix + ".bin":
            raise DataError(
                f"{os.fspath(idx_path)} is not the index of {self._bin.path}",
                fix=f"{os.path.splitext(self._bin.path)[0]}.idx",
            )
        if not self._lengths:
            raise DataError("no token to write", where=self._bin.path, fix="is the input empty?")
        with self._bin, Draft(prefix + ".json") as sidecar, Draft(idx_path) as idx:
            lengths, boundaries = np.frombuffer(self._lengths, np.int32), np.frombuffer(self._boundaries, np.int64)
            for piece in pack_index(self.dtype, lengths, boundaries):
                idx.write(piece)
            contents = {
                "format": SIDECAR_FORMAT,
                "bin": {"bytes": self._bin.nbytes, "sha256": self._bin.sha256},
                "idx": {"bytes": idx.nbytes, "sha256": idx.sha256},
                "dtype": self.dtype.name,
                "sequences": len(lengths),
                "documents": len(boundaries) - 1,
                "tokens": self._bin.nbytes // self.dtype.itemsize,
                "max_id": self._max_id,
                "tokenizer": self._tokenizer.identity if self._tokenizer else None,
                "vocab_size": self._tokenizer.vocab_size if self._tokenizer else None,
            }
            sidecar.write(to_json(contents))
            for draft in (self._bin, sidecar, idx):
                draft.seal()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(idx_path)
            for draft in (self._bin, sidecar, idx):
                draft.publish()

    def discard(self) -> None:
        """Remove what was written; does nothing after `finalize`."""
        self._bin.discard()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()
