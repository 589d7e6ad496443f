"""Documents of a JSONL file that may be broken, huge or malicious.

One JSON object a line. The reader keeps one line in memory, so its memory is bounded by `max_line_bytes` whatever the
file holds, a gzip bomb included; the parser refuses a line that is no text, with its number:

| input                                                      | result                                                 |
|------------------------------------------------------------|--------------------------------------------------------|
| byte-order mark, CRLF, no newline at the end, blank lines  | accepted (blank lines are skipped)                     |
| gzip, xz, bzip2                                            | read, one line in memory                               |
| zstd, Parquet, Arrow, zip, UTF-16, a JSON array, ...       | refused by name, with the command that makes JSONL     |
| bad UTF-8, bad JSON, not an object, a key is missing       | refused with file and line                             |
| a value that is neither text nor a list of texts           | refused with file and line                             |
| half of a surrogate pair, nesting 100,000 deep             | refused with file and line                             |
| a line longer than the limit, a torn or corrupt compressed file | refused with file and line                        |
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from minimegatron.data.publish import CHUNK
from minimegatron.errors import DataError

HEAD = 512
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# first bytes -> (name, how the text inside is read)
COMPRESSED: dict[bytes, tuple[str, Callable[..., IO[bytes]]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),  # type: ignore[dict-item]
    b"\xfd7zXZ\x00": ("xz", lzma.open),  # type: ignore[dict-item]
    b"BZh": ("bzip2", bz2.open),  # type: ignore[dict-item]
}
PANDAS = "python -c \"import pandas; pandas.read_{}('FILE').to_json('FILE.jsonl', orient='records', lines=True)\""
UTF_16, UTF_32 = ((f"text in {name}", f"iconv -f {name} -t UTF-8 FILE > FILE.jsonl") for name in ("UTF-16", "UTF-32"))
# first bytes -> (what it is, the command that makes JSONL of it)
OTHERS: dict[bytes, tuple[str, str]] = {
    b"PAR1": ("a Parquet file", PANDAS.format("parquet")),
    b"ARROW1": ("an Arrow file", PANDAS.format("feather")),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstdcat FILE | minimegatron preprocess --input /dev/stdin"),
    b"PK\x03\x04": ("a zip archive", "unzip it, and give the files that were in it"),
    b"MMIDIDX": ("an index of token ids (.idx)", "train --data-path takes its path without .idx"),
    b"\xff\xfe\0\0": UTF_32, b"\0\0\xfe\xff": UTF_32, b"\xff\xfe": UTF_16, b"\xfe\xff": UTF_16,
}  # fmt: skip


def what_is(head: bytes) -> tuple[str, str] | None:
    """(Name of the format, command that makes JSONL of it) from a file's first bytes; None if it may be JSONL.

    Args:
        head: `HEAD` bytes, or all of a shorter file; decompressed if it is one of `COMPRESSED`.
    """
    for magic, other in OTHERS.items():
        if head.startswith(magic):
            return other
    begin = head.removeprefix(BYTE_ORDER_MARK).lstrip(b" \t\r\n")
    if b"\0" in head and (begin[:1] != b"{" or begin[1:2] == b"\0"):
        return "binary, or text in UTF-16", "for text: iconv -f UTF-16LE -t UTF-8 FILE > FILE.jsonl"
    inside = begin[1:].lstrip(b" \t\r\n")
    first_line = begin.split(b"\n", 1)[0].strip()
    whole_line = b"\n" in begin and first_line.endswith(b"]")  # of many: each is a bad line
    if begin[:1] == b"[" and (first_line == b"[" or inside[:1] == b"{") and not whole_line:
        return "one JSON array, not an object a line", "jq -c '.[]' FILE > FILE.jsonl"
    if first_line == b"{" and b"\n" in begin:
        return "one JSON object over several lines, not an object a line", "jq -c . FILE > FILE.jsonl"
    return None


def compression(head: bytes) -> tuple[str, Callable[..., IO[bytes]]] | None:
    """(Name, function that opens the text inside) for one of `COMPRESSED`, by a file's first bytes."""
    return next((how for magic, how in COMPRESSED.items() if head.startswith(magic)), None)


def describe(path: str | os.PathLike[str]) -> str:
    """The format of a file, in words."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if (inside := compression(head)) is not None:
        return f"compressed by {inside[0]}"
    found = what_is(head)
    return found[0] if found else "text"


MAX_LINE_BYTES = 64 << 20
UNREADABLE = (EOFError, OSError, zlib.error, lzma.LZMAError)  # gzip's and bzip2's own are OSErrors


class Line(NamedTuple):
    """One line of a file.

    Attributes:
        number: from 1.
        data: its bytes without the newline; None when it was longer than the limit.
        position: bytes of the file (compressed bytes of a compressed file) read so far; 0 in a pipe.
    """

    number: int
    data: bytes | None
    position: int


class JsonlReader:
    """Iterates over the non-blank lines of one file or pipe, plain or compressed (told by its first bytes).

    Args:
        path: the file.
        max_line_bytes: a longer line is skipped and given as `data=None`.

    Attributes:
        blank_lines: number of blank lines so far.

    Raises:
        DataError: the file cannot be opened, is no JSONL, or (while iterating) is a torn or corrupt compressed file.
    """

    def __init__(self, path: str | os.PathLike[str], max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = os.fspath(path)
        self.max_line_bytes = max_line_bytes
        self.blank_lines = 0
        try:
            self._raw = open(self.path, "rb")
        except OSError as error:
            raise DataError(
                f"cannot read: {error.strerror}", where=self.path, fix="give the path of a file you may read"
            ) from error
        inside = compression(self._raw.peek(HEAD))
        self._name, self._stream = (inside[0], inside[1](self._raw)) if inside else ("", self._raw)
        try:
            found = what_is(self._stream.peek(HEAD)[:HEAD])  # type: ignore[attr-defined]
        except UNREADABLE as error:
            raise self._torn(error, 1) from error
        if found is not None:
            self._raw.close()
            raise DataError(
                f"this is {found[0]}, and JSONL is expected", where=self.path, fix=found[1].replace("FILE", self.path)
            )

    def __iter__(self) -> Iterator[Line]:
        with self._raw:
            stream, number = self._stream, 0
            while True:
                try:
                    data = stream.readline(self.max_line_bytes + 1)
                    too_long = len(data) > self.max_line_bytes and not data.endswith(b"\n")
                    if too_long:
                        _skip_to_newline(stream)
                except UNREADABLE as error:
                    raise self._torn(error, number + 1) from error
                if not data:
                    return
                number += 1
                if number == 1:
                    data = data.removeprefix(BYTE_ORDER_MARK)
                if too_long:
                    yield Line(number, None, self._position())
                elif data.strip():
                    yield Line(number, data.rstrip(b"\r\n"), self._position())
                else:
                    self.blank_lines += 1

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def _torn(self, error: Exception, line: int) -> DataError:
        what = f"a torn or corrupt {self._name} file" if self._name else "the disk does not give it"
        return DataError(f"{what}: {error}", where=f"{self.path}:{line}", fix="copy or download it again")

    def _position(self) -> int:
        return self._raw.tell() if self._raw.seekable() else 0


def _skip_to_newline(stream: IO[bytes]) -> None:
    while (rest := stream.readline(CHUNK)) and not rest.endswith(b"\n"):
        pass


def parse_document(data: bytes, keys: tuple[str, ...]) -> dict[str, list[str]]:
    """The texts under `keys` of one JSON object; a single text counts as a list of one.

    Raises:
        DataError: see the module's table. The caller knows the line and adds it.
    """
    try:
        document = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"bad UTF-8: byte 0x{data[error.start]:02x} at column {error.start + 1}") from error
    except RecursionError as error:
        raise DataError("JSON nested too deep") from error
    except ValueError as error:  # JSONDecodeError, and integers too long to convert
        raise DataError(f"bad JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"a JSON object is expected, not {type(document).__name__}")
    return {key: _texts(document, key) for key in keys}


def _texts(document: dict, key: str) -> list[str]:
    if key not in document:
        raise DataError(f"no key {key!r}; the keys are {', '.join(map(repr, list(document)[:8])) or 'none'}")
    value = document[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"the value of {key!r} holds {type(text).__name__}, not text")
    return texts
