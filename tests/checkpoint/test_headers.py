"""Headers of safetensors files that lie: each is refused with an error of ours, and nothing is allocated for it."""

from __future__ import annotations

import json
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimegatron.checkpoint.shard_file import DTYPES, read_header, read_tensor, write_shard
from minimegatron.errors import CheckpointError


def good(dice: random.Random) -> dict[str, Any]:
    """A header, of tensors of 1 to 3 dims."""
    header: dict[str, Any] = {"__metadata__": {"step": "1", "run_id": "r"}}
    at = 0
    for i in range(dice.randint(1, 5)):
        shape = [dice.randint(1, 4) for _ in range(dice.randint(1, 3))]
        size = 4
        for n in shape:
            size *= n
        header[f"t{i}"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


HUGE = [2**31, 2**62, 2**63, 2**64, 10**40, -1, -(2**63), 0.5, 1e300, None, True, "3", [], {}]


def entry_lies(header: dict[str, Any], dice: random.Random) -> None:
    """One number, name or type of one tensor."""
    name = dice.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    field = dice.choice(["dtype", "shape", "data_offsets"])
    how = dice.randrange(4)
    if how == 0:
        del entry[field]
    elif how == 1:
        entry[field] = dice.choice([None, 7, "F33", [1] * 9, {"a": 1}, ["x"], [[1]], 1.5, False])
    elif field == "dtype":
        entry[field] = dice.choice(["F64", "U8", "F16", "f32", "", "I128"])
    else:
        at = dice.randrange(len(entry[field]))
        before = entry[field][at]
        entry[field][at] = dice.choice([before + 1, before - 1, before + 4, *HUGE])


def text_lies(text: bytes, dice: random.Random) -> bytes:
    how = dice.randrange(8)
    if how == 0:
        return text[: dice.randrange(len(text))]
    if how == 1:
        return b"[" * dice.randint(1, 100_000) + text
    if how == 2:
        return text.replace(b'"t0"', b'"t0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"t0"', 1)
    if how == 3:
        return text.replace(
            b"[0,", dice.choice([b"[NaN,", b"[Infinity,", b"[-0.0,", b"[" + b"9" * 5000 + b",", b"[[0],"]), 1
        )
    if how == 4:
        return text.replace(b'"step":"1"', b'"step":' + dice.choice([b"1", b"null", b"{}", b'["1"]']))
    if how == 5:
        return dice.choice([b"", b"null", b"3", b'"x"', b"[]", b"\xff\xfe" + text, b"\x80\x04" + text])
    if how == 6:
        return text.replace(b"}", b"", 1)
    more = ",".join(f'"x{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(dice.randint(1, 99)))
    return text[:-1] + b',"__metadata__":{},' + more.encode() + b"}"


def lie(dice: random.Random) -> bytes:
    """A file whose header says something that is not so."""
    header = good(dice)
    ends = [e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"]
    data = dice.randbytes(max(ends))
    kind = dice.randrange(4)
    if kind == 0:
        entry_lies(header, dice)
    text = json.dumps(header, separators=(",", ":")).encode()
    if kind == 1:
        text = text_lies(text, dice)
    length = len(text)
    if kind == 2:
        length = dice.choice([0, 1, length - 1, length + 1, len(data) + length + 1, 2**24 + 1, 2**31, 2**63, 2**64 - 1])
    if kind == 3:
        data = data[: dice.randrange(len(data))] if dice.random() < 0.5 else data + dice.randbytes(dice.randint(1, 9))
    return struct.pack("<Q", length) + text + data


def largest() -> dict[str, bytes]:
    """Headers at the limits of what is read at all, each with a lie."""
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    last = b'"x":{"dtype":"F32","shape":[0],"data_offsets":[0,4]}}'
    tables = {f"{n} tensors": b"{" + b"".join(entry % i for i in range(n)) + last for n in (150_000, 99_000)}
    files = {name: struct.pack("<Q", len(table)) + table for name, table in tables.items()}
    return files | {"16 MiB of brackets": struct.pack("<Q", 1 << 24) + b"[" * (1 << 24)}


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    tensors = {
        f"t{i}": (100 * torch.randn(shape)).to(dtype) for i, dtype in enumerate(DTYPES.values()) for shape in [(2, 3)]
    } | {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.0), "view": torch.arange(20.0).view(4, 5)[:, 1:3]}
    with (tmp_path / "ours").open("wb") as file:
        length, _ = write_shard(file, tensors, {"step": "1"})
    safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "theirs", {"step": "1"})
    assert (tmp_path / "ours").stat().st_size == length
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    for name in ("ours", "theirs"):
        entries, metadata = read_header(tmp_path / name)
        assert metadata == {"step": "1"} and entries.keys() == tensors.keys()
        with (tmp_path / name).open("rb") as file:
            for key, tensor in tensors.items():
                for found in (read_tensor(file, entries[key]), theirs[key]):
                    assert found.dtype == tensor.dtype and found.shape == tensor.shape
                    assert (
                        found.contiguous()
                        .view(-1)
                        .view(torch.uint8)
                        .equal(tensor.contiguous().view(-1).view(torch.uint8))
                    )


def refused(path: Path, content: bytes) -> bool:
    """Whether a file with this content is refused, by an error that names it and is no longer than a screen."""
    path.write_bytes(content)
    try:
        read_header(path)
    except CheckpointError as error:
        return str(path) in str(error) and len(str(error)) < 1000
    return False


def refuse_all(folder: Path, number: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = [seed for seed in range(number) if not refused(folder / "file", lie(random.Random(seed)))]
    assert not taken, f"{len(taken)} of {number}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


def test_headers_that_lie_are_refused(tmp_path):
    refuse_all(tmp_path, 500)


@pytest.mark.thorough
def test_10_000_headers_that_lie_are_refused(tmp_path):
    refuse_all(tmp_path, 10_000)


TENSOR = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
LIES = {
    '{"a{}":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}': r"gives 'a{}' of shape \[2\] 4 bytes",
    '{"a":{"dtype":"F{}","shape":[1],"data_offsets":[0,4]}}': "gives 'a' the unknown dtype 'F{}'",
    '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}': "gives 'a' 1 dims and 3 offsets",
    '{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}': "describes 'a' without a shape and offsets in whole",
    '{"a":{"dtype":"F32","data_offsets":[0,4]}}': "describes 'a' without a shape and offsets in whole",
    '{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}': "names something twice",
    f'{{"a":{TENSOR},"b":{{"in":{TENSOR}}}}}': "describes 'b' without",
    f'{{"a":{TENSOR},"b":{TENSOR}}}': "has a gap or an overlap at byte",
    f'{{"a":{TENSOR},"__metadata__":{TENSOR}}}': "metadata that are no table of texts",
    f'{{"a":{TENSOR},"__metadata__":{{"b":{TENSOR}}}}}': "metadata that are no table of texts",
    f'{{"a":{TENSOR},"__metadata__":{{"b":{TENSOR.replace("1", "2")}}}}}': "metadata that are no table of texts",
    TENSOR: "describes 'dtype' without a shape and offsets in whole",
    "[]": "has a header that is no table",
}


@pytest.mark.parametrize("header", LIES)
def test_what_is_wrong_is_said_with_the_name_of_the_tensor(header, tmp_path):
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
    with pytest.raises(CheckpointError, match=LIES[header]):
        read_header(tmp_path / "file")


@pytest.mark.slow
def test_the_largest_headers_are_refused(tmp_path):
    for name, content in largest().items():
        assert refused(tmp_path / name, content), name
    for short in (b"1234567", b""):
        assert refused(tmp_path / "short", short)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none")
