"""Files of documents: JSONL, plain text, Parquet. Each is read as lines of JSON, so what follows knows one form.

| file                              | a document is                                                | where an error is |
|-----------------------------------|--------------------------------------------------------------|-------------------|
| `.txt`, `.text`, `.md`, `.rst`    | what stands between two separators; without one, the file    | its first line    |
| Parquet, by its first bytes       | a row                                                        | the row, from 1   |
| any other                         | a line of JSON (`jsonl`)                                     | the line          |

Each may also be compressed (`notes.txt.gz`; Parquet has a compression of its own), or a file of the hub
(`hf://datasets/OWNER/NAME/FILE`). A separator is a line of its own: `<|endoftext|>`, as in the files of TinyStories, or
any other that is given; "" means a blank line.

Memory is bounded by one document, or by a row group of Parquet, whose size its writer has chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from minimegatron.data.formats import PARQUET, open_raw
from minimegatron.data.jsonl import MAX_LINE_BYTES, JsonlReader, Line
from minimegatron.errors import DataError

TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst"}
COMPRESSION_SUFFIXES = {".gz", ".xz", ".bz2", ".zst"}
SEPARATOR = "<|endoftext|>"
ROWS = 256  # of Parquet that are turned into Python's objects at once


def reader_of(
    path: str | os.PathLike[str],
    keys: Sequence[str] | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    separator: str = SEPARATOR,
) -> JsonlReader | ParquetReader:
    """The reader of a file, by its name and its first bytes.

    Args:
        path: the file; a pipe is JSONL.
        keys: what is wanted of a document; None for all of it. The text of a text file has the first of them.
        max_line_bytes: a longer line of JSON, or a longer text, is given as `data=None`.
        separator: the line between two documents of a text file.

    Raises:
        DataError: the file cannot be opened, or is in a format that is not read.
    """
    name = PurePath(os.fspath(path))
    if name.suffix in COMPRESSION_SUFFIXES:
        name = name.with_suffix("")
    if name.suffix in TEXT_SUFFIXES:
        return TextReader(path, keys[0] if keys else "text", max_line_bytes, separator)
    if name.suffix == ".parquet" or (os.path.isfile(path) and _begins_with(path, PARQUET)):
        return ParquetReader(path, keys)
    return JsonlReader(path, max_line_bytes)


def _begins_with(path: str | os.PathLike[str], magic: bytes) -> bool:
    with open_raw(os.fspath(path)) as file:
        return file.read(len(magic)) == magic


class TextReader(JsonlReader):
    """Iterates over the documents of a text file. A document of white space alone is skipped and counted.

    Args:
        path: the file, plain or compressed.
        key: of the JSON object in which a document's text is given.
        max_line_bytes: a longer document is skipped and given as `data=None`.
        separator: the line between two documents; "" for a blank line.
    """

    is_json = False

    def __init__(
        self, path: str | os.PathLike[str], key: str, max_line_bytes: int = MAX_LINE_BYTES, separator: str = SEPARATOR
    ) -> None:
        super().__init__(path, max_line_bytes)
        self.key, self.separator = json.dumps(key).encode(), separator.encode()

    def __iter__(self) -> Iterator[Line]:
        lines: list[bytes] | None = []  # None: the document is too long
        first, size, position = 1, 0, 0
        for line in self._lines():
            position = line.position
            if line.data is not None and line.data.strip() == self.separator:
                yield from self._document(lines, first, position)
                lines, first, size = [], line.number + 1, 0
                continue
            size += len(line.data or b"") + 1
            if line.data is None or size > self.max_line_bytes:
                lines = None
            if lines is not None and line.data is not None:
                lines.append(line.data)
        yield from self._document(lines, first, position)

    def _document(self, lines: list[bytes] | None, first: int, position: int) -> Iterator[Line]:
        if lines is None:
            yield Line(first, None, position)
            return
        data = b"\n".join(lines)
        if not data.strip():
            self.blank_lines += bool(lines)
            return
        try:
            text = json.dumps(data.decode("utf-8"), ensure_ascii=False).encode()
            yield Line(first, b"{%b: %b}" % (self.key, text), position)
        except UnicodeDecodeError:
            yield Line(first, data, position)  # whoever reads the line says which byte is bad


class ParquetReader:
    """Iterates over the rows of a Parquet file, a row group at a time.

    Args:
        path: the file.
        keys: the columns that are read; None for all.

    Attributes:
        path: the file.
        blank_lines: 0: a row is a document, also one without text.

    Raises:
        DataError: it is no Parquet file, or `pyarrow` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str] | None = None) -> None:
        self.path, self.blank_lines = os.fspath(path), 0
        try:
            from pyarrow import ArrowException, parquet
        except ModuleNotFoundError as error:
            fix = "pip install 'minimegatron[data]'"
            raise DataError(
                "a Parquet file, and the package pyarrow is not installed", where=self.path, fix=fix
            ) from error
        self._raw, self._torn = open_raw(self.path), (ArrowException, OSError)
        try:
            self._file = parquet.ParquetFile(self._raw)
        except self._torn as error:
            raise self._damaged(error, 1) from error
        names = self._file.schema_arrow.names
        # A column that is missing is not asked for: the row without it is refused as a line of JSON is.
        self._columns = names if keys is None else [key for key in keys if key in names] or names[:8]

    def __iter__(self) -> Iterator[Line]:
        with self._raw:
            size = os.fstat(self._raw.fileno()).st_size if os.path.isfile(self.path) else 0
            number, total = 0, max(1, self._file.metadata.num_rows)
            # Asked for all row groups at once, pyarrow reads the whole file before it gives the first row.
            batches = (
                rows
                for group in range(self._file.num_row_groups)
                for rows in self._file.iter_batches(batch_size=ROWS, row_groups=[group], columns=self._columns)
            )
            while True:
                try:
                    rows = next(batches, None)
                except self._torn as error:
                    raise self._damaged(error, number + 1) from error
                if rows is None:
                    return
                for row in rows.to_pylist():
                    number += 1
                    data = json.dumps(row, ensure_ascii=False, default=_no_text).encode("utf-8", "surrogatepass")
                    yield Line(number, data, size * number // total)

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def _damaged(self, error: Exception, row: int) -> DataError:
        what = f"a torn or corrupt Parquet file: {str(error).splitlines()[0]}"
        return DataError(what, where=f"{self.path}:{row}", fix="copy or download it again")


def _no_text(value: Any) -> Any:
    """What JSON has not, such as a date or bytes, is not text either: an object, which a reader of texts refuses."""
    return {"type": type(value).__name__}
