"""Files of documents in other forms than JSONL: text, Parquet, zstd; and what was left out of them."""

import datetime
import json
import os

import pytest

from minimegatron.data.documents import reader_of
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.jsonl import JsonlReader, parse_document
from minimegatron.data.preprocess import main, preprocess
from minimegatron.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")
BYTES = {"tokenizer_type": "ByteLevelTokenizer"}


def texts(path, *keys, **options):
    """(number, text) of a file's documents."""
    keys = keys or ("text",)
    return [(line.number, parse_document(line.data, keys)[keys[0]][0]) for line in reader_of(path, keys, **options)]


def parquet(path, rows, **options):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_a_text_file_is_cut_at_its_separators(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes('\ufeffone\r\n\r\n"two" ü\n<|endoftext|>\n\n  <|endoftext|>\nthree'.encode())
    assert texts(path) == [(1, 'one\n\n"two" ü'), (7, "three")]
    assert texts(path, separator="three") == [(1, path.read_text("utf-8-sig").rpartition("\n")[0])]
    assert texts(path, separator="") == [(1, "one"), (3, '"two" ü\n<|endoftext|>'), (6, "  <|endoftext|>\nthree")]
    reader = reader_of(path)
    assert [line.position for line in reader][-1] == path.stat().st_size and reader.blank_lines == 1
    (tmp_path / "y.md.zst").write_bytes(zstandard.compress(path.read_bytes()))
    assert texts(tmp_path / "y.md.zst") == texts(path)
    path.write_text('[{"this": "is text"}]')
    assert texts(path) == [(1, '[{"this": "is text"}]')]


def test_a_text_that_is_too_long_or_no_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"12345\n12345\n<|endoftext|>\n1234567890123456\n<|endoftext|>\nfine\n<|endoftext|>\nb\xffd\n")
    lines = list(reader_of(path, max_line_bytes=14))
    assert [(line.number, line.data is None) for line in lines] == [(1, False), (4, True), (6, False), (8, False)]
    with pytest.raises(DataError, match="bad UTF-8: byte 0xff at column 2"):
        parse_document(lines[3].data, ("text",))
    path.write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match="this is text in UTF-16, and text is expected"):
        reader_of(path)


def test_rows_of_parquet(tmp_path):
    rows = [{"text": f"row {i}", "id": i, "more": ["a", "ü"], "when": datetime.date(2020, 1, 1)} for i in range(1000)]
    path = parquet(tmp_path / "x.parquet", rows, row_group_size=300)
    assert texts(path) == [(i + 1, f"row {i}") for i in range(1000)]
    line = next(iter(reader_of(path, ["more", "text"])))
    assert parse_document(line.data, ("more", "text")) == {"more": ["a", "ü"], "text": ["row 0"]}
    assert [line.position for line in reader_of(path)][-1] == path.stat().st_size
    for key, says in (
        ("Text", "no key 'Text'; the keys are 'text'"),
        ("id", "int, not text"),
        ("when", "dict, not text"),
    ):
        with pytest.raises(DataError, match=says):
            texts(path, key)
    path.rename(tmp_path / "without-a-suffix")
    assert len(texts(tmp_path / "without-a-suffix")) == 1000
    with pytest.raises(DataError, match="this is a Parquet file, and JSONL is expected"):
        JsonlReader(tmp_path / "without-a-suffix")


@pytest.mark.parametrize("end", [3, 100, -1, -200])
def test_torn_parquet(tmp_path, end):
    path = parquet(tmp_path / "x.parquet", [{"text": "a" * i} for i in range(100)])
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(DataError, match="a torn or corrupt Parquet file: .+") as caught:
        texts(path)
    assert caught.value.where == f"{path}:1"


@pytest.mark.parametrize("frames", [1, 3])
def test_zstd_is_read_and_a_torn_one_is_named(tmp_path, frames):
    """`zstandard`'s own reader ends without a word where a file has been torn."""
    path = tmp_path / "x"
    data = b"".join(
        zstandard.compress(b'{"text": "%d"}\n' % i + os.urandom(5000).hex().encode() + b"\n") for i in range(frames)
    )
    path.write_bytes(data)
    lines = [line.data for line in JsonlReader(path)]
    assert len(lines) == 2 * frames and lines[-2] == b'{"text": "%d"}' % (frames - 1)
    for end in (len(data) - 1, len(data) // (2 * frames)):
        path.write_bytes(data[:end])
        with pytest.raises(DataError, match="torn or corrupt zstd file"):
            list(JsonlReader(path))
    path.write_bytes(data[:10] + b"damage" + data[16:])
    with pytest.raises(DataError, match="torn or corrupt zstd file"):
        list(JsonlReader(path))


def test_all_forms_give_the_same_tokens_and_what_is_left_out_is_said(tmp_path, capsys):
    found = ["first", "second ü", "third"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(found))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress((tmp_path / "a.jsonl").read_bytes()))
    parquet(tmp_path / "a.parquet", [{"text": text} for text in found])
    bins = []
    for name in ("a.jsonl", "a.txt", "a.jsonl.zst", "a.parquet"):
        preprocess([tmp_path / name], tmp_path / name, BYTES, append_eod=True)
        bins.append((tmp_path / f"{name}_text_document.bin").read_bytes())
    assert len(set(bins)) == 1 and len(IndexedDataset(str(tmp_path / "a.txt_text_document"))) == 3

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"text": 1}\n{"text": "x"\n{"Text": "x"}\n{"text": 2}\n')
    words = ["--input", str(bad), str(tmp_path / "a.parquet"), "--output-prefix", str(tmp_path / "b")]
    words += ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--on-bad-line", "skip"]
    assert main([*words, "--train-iters", "10", "--global-batch-size", "2", "--seq-length", "8"]) == 0
    said = capsys.readouterr().out
    assert f"skipped: the value of 'text' holds int, not text: 2, the first at {bad}:2" in said
    assert f"skipped: bad JSON: 1, the first at {bad}:3" in said
    assert f"skipped: no key 'text': 1, the first at {bad}:4" in said
    assert "reads 160 tokens: 6.96 epochs" in said  # 4 + 5 + 9 + 5 bytes
    assert main([*words, "--train-iters", "10"]) == 2
    assert "--global-batch-size and --seq-length" in capsys.readouterr().err
