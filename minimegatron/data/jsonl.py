"""Documents of a JSONL file that may be broken, huge or malicious.

One JSON object a line. The reader keeps one line in memory, so its memory is bounded by `max_line_bytes` whatever the
file holds, a gzip bomb included; the parser refuses a line that is no text, with its number:

| input                                                      | result                                                 |
|------------------------------------------------------------|--------------------------------------------------------|
| byte-order mark, CRLF, no newline at the end, blank lines  | accepted (blank lines are skipped)                     |
| gzip, xz, bzip2, zstd                                      | read, one line in memory                               |
| Arrow, zip, UTF-16, a JSON array, ... (`formats`)          | refused by name, with the command that makes JSONL     |
| bad UTF-8, bad JSON, not an object, a key is missing       | refused with file and line                             |
| a value that is neither text nor a list of texts           | refused with file and line                             |
| half of a surrogate pair, nesting 100,000 deep             | refused with file and line                             |
| a line longer than the limit, a torn or corrupt compressed file | refused with file and line                        |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import IO, NamedTuple

from minimegatron.data.formats import BYTE_ORDER_MARK, HEAD, UNREADABLE, compression, open_raw, what_is
from minimegatron.data.publish import CHUNK
from minimegatron.errors import DataError

MAX_LINE_BYTES = 64 << 20


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

    `TextReader` and `ParquetReader` in `documents` give the documents of other files in the same form.

    Args:
        path: the file.
        max_line_bytes: a longer line is skipped and given as `data=None`.

    Attributes:
        blank_lines: number of blank lines so far.

    Raises:
        DataError: the file cannot be opened, is no JSONL, or (while iterating) is a torn or corrupt compressed file.
    """

    is_json = True

    def __init__(self, path: str | os.PathLike[str], max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = os.fspath(path)
        self.max_line_bytes = max_line_bytes
        self.blank_lines = 0
        self._raw = open_raw(self.path)
        inside = compression(self._raw.peek(HEAD))
        try:
            self._name, self._stream = (inside[0], inside[1](self._raw)) if inside else ("", self._raw)
            found = what_is(self._stream.peek(HEAD)[:HEAD], self.is_json)  # type: ignore[attr-defined]
        except DataError as error:
            raise DataError(error.what, where=self.path, fix=error.fix.replace("FILE", self.path)) from error
        except UNREADABLE as error:
            raise self._torn(error, 1) from error
        if found is not None:
            self._raw.close()
            raise DataError(
                f"this is {found[0]}, and {'JSONL' if self.is_json else 'text'} is expected",
                where=self.path,
                fix=found[1].replace("FILE", self.path),
            )

    def __iter__(self) -> Iterator[Line]:
        for line in self._lines():
            if line.data is None or line.data.strip():
                yield line
            else:
                self.blank_lines += 1

    def _lines(self) -> Iterator[Line]:
        """All lines, the blank ones too."""
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
                yield Line(number, None if too_long else data.rstrip(b"\r\n"), self._position())

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
