"""What a file is, by its first bytes: to say so, where something else was expected.

| met                              | done                                                                              |
|----------------------------------|-----------------------------------------------------------------------------------|
| gzip, xz, bzip2                  | read, as the text inside                                                          |
| zstd, Parquet, Arrow, zip, ...   | refused by name, with the command that makes JSONL of it                          |
| UTF-16 and UTF-32                | refused: with or without a byte-order mark                                        |
| a JSON array, one object over several lines | refused: it would have to be in memory as a whole                      |
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from typing import IO

HEAD = 512
# first bytes -> (name, how the text inside is read)
COMPRESSED: dict[bytes, tuple[str, Callable[..., IO[bytes]]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),  # type: ignore[dict-item]
    b"\xfd7zXZ\x00": ("xz", lzma.open),  # type: ignore[dict-item]
    b"BZh": ("bzip2", bz2.open),  # type: ignore[dict-item]
}
PANDAS = "python -c \"import pandas; pandas.read_{}('FILE').to_json('FILE.jsonl', orient='records', lines=True)\""
# first bytes -> (what it is, the command that makes JSONL of it)
OTHERS: dict[bytes, tuple[str, str]] = {
    b"PAR1": ("a Parquet file", PANDAS.format("parquet")),
    b"ARROW1": ("an Arrow file", PANDAS.format("feather")),
    b"\x28\xb5\x2f\xfd": (
        "compressed by zstd",
        "zstd -d FILE, or zstdcat FILE | minimegatron preprocess --input /dev/stdin",
    ),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "lz4 -d FILE FILE.jsonl"),
    b"PK\x03\x04": ("a zip archive", "unzip it, and give the files that were in it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7-zip archive", "7z x FILE, and give the files that were in it"),
    b"%PDF": ("a PDF", "text has to be taken out of it: pdftotext FILE"),
    b"\x89HDF": ("an HDF5 file", PANDAS.format("hdf")),
    b"\x93NUMPY": ("a NumPy array", "documents are text here, one JSON object a line"),
    b"Obj\x01": ("an Avro file", "write it as JSONL, one object a line"),
    b"MMIDIDX": (
        "an index of token ids (.idx)",
        "it is preprocessed already: train --data-path takes its path without .idx",
    ),
}
NOT_UTF_8 = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


def what_is(head: bytes) -> tuple[str, str] | None:
    """(what a file is, how it becomes JSONL) from its first bytes; None for what may be JSONL.

    Args:
        head: `HEAD` bytes, or all of a shorter file; decompressed where it is one of `COMPRESSED`.
    """
    for magic, said in OTHERS.items():
        if head.startswith(magic):
            return said
    if head[257:262] == b"ustar":
        return "a tar archive", "tar -xf FILE, and give the files that were in it"
    for mark, name in NOT_UTF_8:
        if head.startswith(mark):
            return f"text in {name}", f"iconv -f {name} -t UTF-8 FILE > FILE.jsonl"
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    if begin[:2] in (b"{\0", b"[\0") or (begin[:1] == b"\0" and begin[1:2] in (b"{", b"[")):
        name = "UTF-16LE" if begin[:1] != b"\0" else "UTF-16BE"
        return f"text in {name}", f"iconv -f {name} -t UTF-8 FILE > FILE.jsonl"
    if b"\0" in head and begin[:1] != b"{":
        return "binary", "documents are text here, one JSON object a line"
    inside = begin[1:].lstrip(b" \t\r\n")
    first_line = begin.split(b"\n", 1)[0].strip()
    whole_line = b"\n" in begin and first_line.endswith(b"]")  # of many: each is a bad line
    if begin[:1] == b"[" and (first_line == b"[" or inside[:1] == b"{") and not whole_line:
        return "one JSON array, not an object a line", "jq -c '.[]' FILE > FILE.jsonl"
    if first_line == b"{" and b"\n" in begin:
        return "one JSON object over several lines, not an object a line", "jq -c . FILE > FILE.jsonl"
    return None


def compression(head: bytes) -> tuple[str, Callable[..., IO[bytes]]] | None:
    """(name, how the text inside is read) of one of `COMPRESSED`, by a file's first bytes."""
    return next((how for magic, how in COMPRESSED.items() if head.startswith(magic)), None)


def describe(path: str | os.PathLike[str]) -> str:
    """What a file is, in words."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if (inside := compression(head)) is not None:
        return f"compressed by {inside[0]}"
    found = what_is(head)
    return found[0] if found else "text"
