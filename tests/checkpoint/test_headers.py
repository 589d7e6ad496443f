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
from tests.thorough import mostly_thorough


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


def refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("number", mostly_thorough([500, 10_000], [0]))
def test_headers_that_lie_are_refused(tmp_path, number):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(number):
        refused(tmp_path / "file", lie(random.Random(seed)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


def test_the_largest_headers_are_refused_before_they_are_parsed(tmp_path):
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    many = b"{" + b"".join(entry % i for i in range(150_000)) + b'"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    refused(tmp_path / "many", struct.pack("<Q", len(many)) + many)
    refused(tmp_path / "deep", struct.pack("<Q", 1 << 24) + b"[" * (1 << 24))
    short = tmp_path / "short"
    refused(short, b"1234567")
    refused(short, b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none")
