"""Documents out of a JSONL file that may be broken, huge or hostile.

One JSON object a line. The reader keeps one line in memory, so its memory is bounded by `max_line_bytes` whatever the
file holds, a gzip bomb included; the parser refuses what it cannot turn into text, naming the line:

| met                                                        | done                                                   |
|------------------------------------------------------------|--------------------------------------------------------|
| byte-order mark, CRLF, no newline at the end, blank lines  | read as they are meant (blank lines hold nothing)      |
| bad UTF-8, bad JSON, not an object, a key is missing       | refused with file and line                             |
| a value that is neither text nor a list of texts           | refused with file and line                             |
| half of a surrogate pair, nesting 100,000 deep             | refused with file and line                             |
| a line longer than the limit, a torn or corrupt gzip file  | refused with file and line                             |
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

from minimegatron.data.publish import CHUNK
from minimegatron.errors import DataError

MAX_LINE_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line of a file.

    Attributes:
        number: from 1.
        data: its bytes without the newline; None when it was longer than the limit.
        position: bytes of the file (compressed bytes of a gzip file) read so far; 0 in a pipe.
    """

    number: int
    data: bytes | None
    position: int


class JsonlReader:
    """Iterates over the non-blank lines of one file or pipe, plain or gzip (told by its first two bytes).

    Args:
        path: the file.
        max_line_bytes: a longer line is read past and given as `data=None`.

    Attributes:
        blank_lines: how many were met so far.

    Raises:
        DataError: the file cannot be opened, or (while iterating) is a torn or corrupt gzip file.
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
        self.is_gzip = self._raw.peek(2)[:2] == b"\x1f\x8b"

    def __iter__(self) -> Iterator[Line]:
        with self._raw:
            stream: IO[bytes] = gzip.open(self._raw) if self.is_gzip else self._raw  # type: ignore[assignment]
            number = 0
            while True:
                try:
                    data = stream.readline(self.max_line_bytes + 1)
                    too_long = len(data) > self.max_line_bytes and not data.endswith(b"\n")
                    if too_long:
                        _skip_to_newline(stream)
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise DataError(
                        f"a torn or corrupt gzip file: {error}",
                        where=f"{self.path}:{number + 1}",
                        fix="copy or download it again",
                    ) from error
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
