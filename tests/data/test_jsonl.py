"""Hostile JSONL: each kind of damage is refused at its line, in bounded memory."""

import gzip
import json
import random
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("seed", range(6))
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
    with pytest.raises(DataError, match="gzip") as caught:
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
    """A gibibyte without a newline, real or compressed, under a limit of 4 MiB a line."""
    path = tmp_path / "x"
    if kind == "gzip bomb":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(1024):
                file.write(bytes(1 << 20))
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 30)  # sparse: a gibibyte of zeros without a newline
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=120)
    numbers, kilobytes = done.stdout.split("\n")[:2]
    assert numbers == "[1]", done.stderr
    assert int(kilobytes) < 64 << 10
