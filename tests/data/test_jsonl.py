"""Hostile JSONL: each kind of damage is refused at its line, in bounded memory."""

import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys

import pytest

from minimegatron.data.formats import describe
from minimegatron.data.jsonl import JsonlReader, parse_document
from minimegatron.errors import DataError
from tests.thorough import mostly_thorough


def lines(path, **options):
    return [(line.number, line.data) for line in JsonlReader(path, **options)]


def test_what_everybody_means(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": 2}\n{"a": 3}')
    reader = JsonlReader(path)
    assert [(line.number, json.loads(line.data.decode())["a"]) for line in reader] == [(1, 1), (4, 2), (5, 3)]
    assert reader.blank_lines == 2
    (tmp_path / "y.jsonl").write_bytes(gzip.compress(path.read_bytes()))
    assert lines(tmp_path / "y.jsonl") == lines(path)


@pytest.mark.parametrize(
    "data, says",
    [
        (b'{"text": "a', "bad JSON"),
        (b'{"text": "a"} x', "bad JSON"),
        (b"\xef\xbb\xbf{}", "bad JSON"),
        (b'{"text": "\xff"}', "bad UTF-8: byte 0xff at column 11"),
        ('{"text": "a"}'.encode("utf-16"), "bad UTF-8"),
        (b"[1]", "object is expected, not list"),
        (b'{"Text": "a"}', "no key 'text'; the keys are 'Text'"),
        (b"{}", "no key 'text'; the keys are none"),
        (b'{"text": null}', "NoneType, not text"),
        (b'{"text": ["a", 1]}', "int, not text"),
        (b'{"text": {"a": "b"}}', "dict, not text|str, not text"),
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": ' * 100_000, "nested too deep"),
        (b'{"text": ' + b"9" * 5000 + b"}", "bad JSON"),
    ],
)
def test_lines_that_are_refused(data, says):
    with pytest.raises(DataError, match=says):
        parse_document(data, ("text",))


def test_a_text_and_a_list_of_texts():
    assert parse_document(b'{"a": "x", "b": ["y", "z"], "c": 1}', ("a", "b")) == {"a": ["x"], "b": ["y", "z"]}


def test_a_line_longer_than_the_limit_is_read_past(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345\n" + b"x" * 3_000_000 + b"\n1234567890\n12345678901\nlast-line-long")
    found = lines(path, max_line_bytes=10)
    assert found == [(1, b"12345"), (2, None), (3, b"1234567890"), (4, None), (5, None)]


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress])
def test_compressed_files_are_read_and_a_torn_one_is_named(tmp_path, compress):
    path, text = tmp_path / "x", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n'
    path.write_bytes(compress(text))
    assert [data for _, data in lines(path)] == [b'{"text": "a"}', b'{"text": "b"}']
    for end in (7, 20, len(compress(text)) - 3):
        path.write_bytes(compress(text)[:end])
        with pytest.raises(DataError, match="torn or corrupt (gzip|xz|bzip2) file"):
            lines(path)


TEXT = '{"text": "ü"}\n'
OTHER_FORMATS = {
    "a Parquet file": b"PAR1\x15\x04\x15",
    "an Arrow file": b"ARROW1\0\0",
    "a zip archive": b"PK\x03\x04\x14\0",
    "text in UTF-16": TEXT.encode("utf-16"),
    "text in UTF-32": TEXT.encode("utf-32"),
    "binary, or text in UTF-16": TEXT.encode("utf-16-le"),
    "one JSON array": b'\xef\xbb\xbf[{"text": "a"}, {"text": "b"}]',
    "one JSON array,": b'[\n  {"text": "a"}\n]\n',
    "one JSON object over several lines": b'{\n  "text": "a"\n}\n',
    "binary": b"\x01\x02\0\x03",
    "an index of token ids": b"MMIDIDX\0\0",
}


@pytest.mark.parametrize("what", OTHER_FORMATS)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_file_of_another_format_is_named(tmp_path, what, compress):
    path = tmp_path / "x"
    path.write_bytes(compress(OTHER_FORMATS[what]))
    with pytest.raises(DataError, match=f"this is {what}") as error:
        JsonlReader(path)
    assert error.value.where == str(path) and error.value.fix and "\n" not in error.value.fix
    if compress is bytes:
        assert describe(path).startswith(what.rstrip(","))


@pytest.mark.parametrize(
    "text", [b"", b"[1]\n[2]", b'["a"]', b'[{"a": 1}]\n[]', b'{"a": 1}', b"{}", b"words", b"\n\n{}", b'{"a":\n']
)
def test_what_may_be_jsonl_is_judged_by_its_lines(tmp_path, text):
    (tmp_path / "x").write_bytes(text)
    assert [data for _, data in lines(tmp_path / "x")] == [line for line in text.split(b"\n") if line]


@pytest.mark.parametrize("seed", range(2))
def test_torn_and_corrupt_gzip(tmp_path, seed):
    rng = random.Random(seed)
    text = b"".join(b'{"text": "%d"}\n' % rng.randrange(10**9) for _ in range(2000))
    data = bytearray(gzip.compress(text, mtime=0))
    if seed % 2:
        del data[rng.randrange(20, len(data)) :]
    else:
        place = rng.randrange(10, len(data) - 4)
        data[place] ^= 0xFF
    path = tmp_path / "x.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match="gzip file") as caught:
        for _ in JsonlReader(path):
            pass
    assert f"{path}:" in caught.value.where


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        JsonlReader(tmp_path / "none")


LIMITED = """
import re, resource, sys
from minimegatron.data.jsonl import JsonlReader
resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))
print([line.number for line in JsonlReader(sys.argv[1], 4 << 20) if line.data is None])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.parametrize("kind", mostly_thorough(["one line of 1 GiB", "gzip bomb"], [1]))
def test_memory_is_bounded(tmp_path, kind):
    """A gibibyte without a newline, or 96 MiB of them compressed, under a limit of 4 MiB a line."""
    path = tmp_path / "x"
    if kind == "gzip bomb":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(96):
                file.write(b"x" * (1 << 20))
    else:
        with open(path, "wb") as file:
            file.write(b"x" * 4096)
            file.truncate(1 << 30)  # sparse: a gibibyte of zeros without a newline
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=120)
    numbers, kilobytes = done.stdout.split("\n")[:2]
    assert numbers == "[1]", done.stderr
    assert int(kilobytes) < 64 << 10
