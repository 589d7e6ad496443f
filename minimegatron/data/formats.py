"""Which format a file is in, by its first bytes, and how it is opened.

| first bytes of                                          | what happens                                              |
|---------------------------------------------------------|-----------------------------------------------------------|
| gzip, xz, bzip2, zstd                                   | opened; the text inside is looked at in the same way      |
| Parquet                                                 | read row by row (`documents`)                             |
| Arrow, zip, UTF-16, a JSON array, an index of ids, ...  | refused by name, with the command that makes JSONL of it  |

A path that begins with `hf://` is a file of the Hugging Face hub, which is read as it arrives:
`hf://datasets/OWNER/NAME/FILE`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from typing import IO, Any

from minimegatron.errors import ConfigError, DataError

HEAD = 512
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HUB = "hf://"
PARQUET = b"PAR1"


class _Zstd(io.RawIOBase):
    """The text inside of a zstd file. `zstandard`'s own reader takes a torn file for one that has ended."""

    PIECE = 1024  # of the file: at most 43 MB of text, whatever a malicious file does

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self.raw, self.ready = raw, b""
        self.begin = zstandard.ZstdDecompressor().decompressobj
        self.frame = self.begin()
        self.torn = zstandard.ZstdError
        self.inside = False  # of a frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            piece = self.frame.unused_data if self.frame.eof else b""
            if self.frame.eof:
                self.frame, self.inside = self.begin(), False
            piece = piece or self.raw.read(self.PIECE)
            if not piece:
                if self.inside:
                    raise EOFError("the file ends inside of a zstd frame")
                return 0
            try:
                self.ready, self.inside = self.frame.decompress(piece), True
            except self.torn as error:
                raise OSError(str(error)) from error
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def _open_zstd(raw: IO[bytes]) -> IO[bytes]:
    try:
        return io.BufferedReader(_Zstd(raw))
    except ModuleNotFoundError as error:
        fix = "pip install 'minimegatron[data]', or: zstdcat FILE | minimegatron preprocess --input /dev/stdin"
        raise DataError("compressed by zstd, and the package zstandard is not installed", fix=fix) from error


# first bytes -> (name, how the text inside is read)
COMPRESSED: dict[bytes, tuple[str, Callable[..., IO[bytes]]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),  # type: ignore[dict-item]
    b"\xfd7zXZ\x00": ("xz", lzma.open),  # type: ignore[dict-item]
    b"BZh": ("bzip2", bz2.open),  # type: ignore[dict-item]
    b"\x28\xb5\x2f\xfd": ("zstd", _open_zstd),
}
UTF_16, UTF_32 = ((f"text in {name}", f"iconv -f {name} -t UTF-8 FILE > FILE.jsonl") for name in ("UTF-16", "UTF-32"))
ARROW = "python -c \"import pandas; pandas.read_feather('FILE').to_parquet('FILE.parquet')\""
# first bytes -> (what it is, the command that makes of it what can be read)
OTHERS: dict[bytes, tuple[str, str]] = {
    PARQUET: ("a Parquet file", "decompress it: Parquet has a compression of its own"),
    b"ARROW1": ("an Arrow file", ARROW),
    b"PK\x03\x04": ("a zip archive", "unzip it, and give the files that were in it"),
    b"MMIDIDX": ("an index of token ids (.idx)", "train --data-path takes its path without .idx"),
    b"\xff\xfe\0\0": UTF_32, b"\0\0\xfe\xff": UTF_32, b"\xff\xfe": UTF_16, b"\xfe\xff": UTF_16,
}  # fmt: skip
UNREADABLE = (EOFError, OSError, zlib.error, lzma.LZMAError)  # gzip's and bzip2's own are OSErrors


def what_is(head: bytes, is_json: bool = True) -> tuple[str, str] | None:
    """(Name of the format, command that makes JSONL of it) from a file's first bytes; None if it may be JSONL.

    Args:
        head: `HEAD` bytes, or all of a shorter file; decompressed if it is one of `COMPRESSED`.
        is_json: whether JSONL is expected; otherwise text of any kind, a JSON array among them.
    """
    for magic, other in OTHERS.items():
        if head.startswith(magic):
            return other
    begin = head.removeprefix(BYTE_ORDER_MARK).lstrip(b" \t\r\n")
    if b"\0" in head and (begin[:1] != b"{" or begin[1:2] == b"\0"):
        return "binary, or text in UTF-16", "for text: iconv -f UTF-16LE -t UTF-8 FILE > FILE.jsonl"
    if not is_json:
        return None
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


def hub() -> Any:
    """The files of the Hugging Face hub, as a file system of `fsspec`.

    Raises:
        ConfigError: `huggingface_hub` is not installed.
    """
    try:
        from huggingface_hub import HfFileSystem
    except ModuleNotFoundError as error:
        raise ConfigError(f"{HUB}: {error}", fix="pip install 'minimegatron[data]'") from error
    return HfFileSystem()


def open_raw(path: str) -> io.BufferedReader:
    """The bytes of a file of this machine or of the hub, as they are.

    Raises:
        DataError: it cannot be opened.
    """
    try:
        if path.startswith(HUB):
            return io.BufferedReader(hub().open(path, "rb"))
        return open(path, "rb")
    except Exception as error:  # the hub's client has many classes of errors, and a refused connection is one more
        if not isinstance(error, OSError) and not path.startswith(HUB):
            raise
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        fix = "is it spelled right, is there internet, is it private (HF_TOKEN)?" if path.startswith(HUB) else ""
        fix = fix or "give the path of a file you may read"
        raise DataError(f"cannot read: {reason}", where=path, fix=fix) from error
