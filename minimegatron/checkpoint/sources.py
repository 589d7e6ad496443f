"""Named tensors that are read box by box, wherever they lie, and views of them under other names.

The problem in a sentence: a model of 140 GB is converted on a machine with 16 GB, so nothing may hold more than the
part that is being written.

A `Source` gives the dtype and shape of each of its tensors and reads boxes of them: a published folder, a checkpoint of
this package or of Megatron, a dict in memory. A `View` is a source whose tensors have other names and are cut
otherwise; it reads them from another source. So

    theirs -> View -> our names    is what a run loads, each rank its own boxes
    ours   -> View -> their names  is what an export writes, one tensor after the other

and both are made from the same list of `Copy`, read from left to right or from right to left.

    Copy(Rows("decoder.layers.0.mlp.linear_fc1.weight", start=96, stop=192),           the lower half of ours
         Rows("model.layers.0.mlp.up_proj.weight",      start=0,  stop=96))            is all of theirs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from minimegatron.checkpoint.disk import UNREADABLE, disk, write_durable
from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.shard_file import Entry, read_header, read_tensor, write_shard
from minimegatron.errors import CheckpointError

BLOCK = 1 << 26  # bytes that are copied at once


class Described(NamedTuple):
    """Dtype and shape of a tensor, known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """Named tensors of which boxes can be read."""

    @property
    def tensors(self) -> Mapping[str, Described]:
        """{name: dtype and shape}."""
        ...

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor, default all of it; the caller must not write into it."""
        ...


def shown(problems: Sequence[str], most: int = 3) -> str:
    """The first few of many lines, indented, for the text of an error."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "".join(f"\n  {line}" for line in [*problems[:most], *more])


def whole(shape: Sequence[int]) -> Box:
    """The box of the whole tensor."""
    return tuple((0, n) for n in shape)


def blocks(box: Sequence[tuple[int, int]], itemsize: int) -> Iterator[list[tuple[int, int]]]:
    """Cut a box by rows into blocks of at most `BLOCK` bytes: a copy then needs little memory beside its target."""
    dim = next((i for i, (a, b) in enumerate(box) if b - a > 1), 0)
    (first, last), inner = box[dim], math.prod(b - a for a, b in box[dim + 1 :])
    step = max(1, BLOCK // max(1, inner * itemsize))
    for start in range(first, last, step):
        yield [*box[:dim], (start, min(start + step, last)), *box[dim + 1 :]]


def intersection(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """The intersection of two boxes, None if it is empty."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return common if all(a < b for a, b in common) else None


def inside(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> Box:
    """A box in the coordinates of another one that contains it."""
    return tuple((a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


def elements(box: Sequence[tuple[int, int]]) -> int:
    """How many numbers a box has."""
    return math.prod(b - a for a, b in box)


def slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """A box as an index of a tensor."""
    return tuple(slice(a, b) for a, b in box)


Piece = tuple[Sequence[tuple[int, int]], Callable[[list[tuple[int, int]]], torch.Tensor]]


def assemble(described: Described, box: Box | None, pieces: Iterable[Piece]) -> torch.Tensor:
    """A box of a tensor that is stored in pieces; 0 where there is no piece.

    Args:
        described: the tensor.
        box: default all of it.
        pieces: (box, function that reads a box within it) pairs; both in coordinates of the tensor.
    """
    dtype, box = described.dtype, whole(described.shape) if box is None else box
    result: torch.Tensor | None = None
    for piece, read in pieces:
        common = intersection(piece, box)
        if common is None:
            continue
        if common == list(box):
            return read(common)  # nothing else lies in this box
        if result is None:
            result = torch.zeros([b - a for a, b in box], dtype=dtype)
        for block in blocks(common, dtype.itemsize):
            result[slices(inside(block, box))] = read(block)
    return torch.zeros([b - a for a, b in box], dtype=dtype) if result is None else result


def matrices(shape: Sequence[int]) -> Iterator[Box]:
    """The boxes of a stack's matrices; for any other tensor the box of all of it."""
    if len(shape) < 3:
        yield whole(shape)
        return
    for i in range(shape[0]):
        for rest in matrices(shape[1:]):
            yield ((i, i + 1), *rest)


def in_files(tensors: Mapping[str, Described], most: int) -> list[dict[str, Described]]:
    """Split tensors, in their order, into files of at most `most` bytes; a larger tensor has a file of its own."""
    files: list[dict[str, Described]] = []
    filled = 0
    for name, described in tensors.items():
        if not files or filled + described.nbytes > most:
            files.append({})
            filled = 0
        files[-1][name] = described
        filled += described.nbytes
    return files


def write_file(
    path: Path, tensors: Mapping[str, Described], metadata: Mapping[str, str], read: Callable[[str], torch.Tensor]
) -> tuple[int, str]:
    """Write a new safetensors file and fsync it; `read` gives each tensor as it is written. Returns length and hash."""
    size = sum(described.nbytes for described in tensors.values())
    return write_durable(path, size, lambda file: write_shard(file, tensors, metadata, read))


class InMemory:
    """Tensors of a state dict."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self.tensors = {name: Described(t.dtype, tuple(t.shape)) for name, t in state.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        tensor = self._state[name].detach()
        return tensor if box is None else tensor[slices(box)]


class SafetensorsFiles:
    """Tensors of safetensors files, whose headers are read at once.

    Args:
        files: each tensor is in one of them.

    Raises:
        CheckpointError: a file is missing or damaged, or two files hold a tensor of the same name.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, tuple[Path, Entry]] = {}
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"no {file}", fix="download the file again")
            try:
                entries, _ = read_header(file)
            except CheckpointError as error:
                fix = "download the file again; it is cut short or damaged"
                raise CheckpointError(error.what, where=error.where, fix=fix) from error
            for name, entry in entries.items():
                if name in self._where:
                    raise CheckpointError(f"{self._where[name][0].name} and {file.name} both hold {name}")
                self._where[name] = file, entry
        self.tensors = {name: Described(entry.dtype, entry.shape) for name, (_, entry) in self._where.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`.

        Raises:
            CheckpointError: a number is not finite.
        """
        file, entry = self._where[name]
        tensor = read_box(file, entry, box)
        values = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no aminmax
        if tensor.is_floating_point() and tensor.numel() and not all(end.isfinite() for end in values.aminmax()):
            raise CheckpointError(
                f"{name} holds numbers that are not finite",
                where=str(file),
                fix="download the file again; the model cannot say anything but NaN",
            )
        return tensor


class Renamed:
    """A source whose tensors have other names.

    Args:
        source: the tensors.
        prefix: put before names, except before those that have it and before `lm_head`.
        parts: parts of names -> what they become.
    """

    def __init__(self, source: Source, prefix: str, parts: Mapping[str, str]) -> None:
        self.source, self._names = source, dict[str, str]()
        for there in source.tensors:
            name = there if there.startswith((prefix, "lm_head.")) else prefix + there
            for old, new in parts.items():
                name = name.replace(old, new)
            self._names[name] = there
        self.tensors = {name: source.tensors[there] for name, there in self._names.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self.source.read(self._names[name], box)


class Together:
    """Several sources as one; the names of each begin with a prefix of its own."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.where = {word + name: (source, name) for word, source in sources.items() for name in source.tensors}
        self.tensors = {name: source.tensors[inner] for name, (source, inner) in self.where.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        source, inner = self.where[name]
        return source.read(inner, box)


def read_box(path: Path, entry: Entry, box: Box | None) -> torch.Tensor:
    """A box of a tensor of a safetensors file; only the rows that the box needs are read."""
    with disk(path, UNREADABLE), path.open("rb") as file:
        if box is None or not box:
            return read_tensor(file, entry)
        (first, last), *rest = box
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        rows = Entry(entry.dtype, (last - first, *entry.shape[1:]), entry.start + first * row, entry.start + last * row)
        if last - first == 1 and len(rest) > 1:  # one expert of a stack: go on inside of it
            inner = Entry(entry.dtype, entry.shape[1:], rows.start, rows.stop)
            return read_box(path, inner, tuple(rest))[None]
        return read_tensor(file, rows)[slice(None), *slices(rest)]


# ------------------------------------------------------------------------------------------------ other names


class Rows(NamedTuple):
    """Rows of a matrix, or elements of a vector.

    Attributes:
        name: name of the tensor.
        start, stop: the rows.
        matrix: number of the matrix, if the tensor is a stack.
        columns: columns instead of rows: the matrix is stored transposed.
    """

    name: str
    start: int
    stop: int
    matrix: tuple[int, ...] = ()
    columns: bool = False

    def box(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        box_of_all = [*((i, i + 1) for i in self.matrix), *((0, n) for n in shape[len(self.matrix) :])]
        box_of_all[self.dim] = (self.start, self.stop)
        return box_of_all

    @property
    def dim(self) -> int:
        return len(self.matrix) + self.columns


class Copy(NamedTuple):
    """The same numbers in two places."""

    ours: Rows
    theirs: Rows

    def turned(self) -> Copy:
        return Copy(self.theirs, self.ours)


class Cast:
    """The tensors of a source in other dtypes.

    Args:
        source: the source.
        dtypes: {name: dtype} of the tensors that change.
    """

    def __init__(self, source: Source, dtypes: Mapping[str, torch.dtype]) -> None:
        self.source = source
        self.tensors = {n: Described(dtypes.get(n, d.dtype), d.shape) for n, d in source.tensors.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self.source.read(name, box).to(self.tensors[name].dtype)


class View:
    """The tensors of a source under other names.

    Args:
        source: the source.
        tensors: tensors of the view; elements that no copy covers are 0 (padding of a vocabulary).
        copies: the rows of the source of which each part of them consists; `ours` is the view's side.
    """

    def __init__(self, source: Source, tensors: Mapping[str, Described], copies: Iterable[Copy]) -> None:
        self.source, self.tensors = source, dict(tensors)
        self.copies: dict[str, list[Copy]] = {name: [] for name in self.tensors}
        for copy in copies:
            self.copies[copy.ours.name].append(copy)
        self._read_last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        described = self.tensors[name]
        pieces = [(copy.ours.box(described.shape), partial(self._fetch, copy)) for copy in self.copies[name]]
        return assemble(described, box, pieces)

    def _fetch(self, copy: Copy, box: list[tuple[int, int]]) -> torch.Tensor:
        """The part of a copy in this box of ours, from the source, in our shape."""
        ours, theirs = copy
        inner = box[len(ours.matrix) :]
        at = int(ours.columns)
        inner[at] = (inner[at][0] - ours.start + theirs.start, inner[at][1] - ours.start + theirs.start)
        turned = ours.columns != theirs.columns
        if turned:
            inner.reverse()
        stack = [(i, i + 1) for i in theirs.matrix]
        if theirs.columns:  # no file can be read by columns: read it once, for all groups of heads
            if self._read_last is None or self._read_last[0] != theirs.name:
                self._read_last = None
                self._read_last = theirs.name, self.source.read(theirs.name)
            tensor = self._read_last[1][slices(inner)]
        else:
            tensor = self.source.read(theirs.name, (*stack, *inner))[(0,) * len(stack)]
        tensor = tensor.t() if turned else tensor
        return tensor[(None,) * len(ours.matrix)]
