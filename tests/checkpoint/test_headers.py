"""Headers of safetensors files that lie: each is refused with an error of ours, and nothing is allocated for it."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from minimegatron.checkpoint.shard_file import DTYPES, read_header, read_tensor, write_shard
from minimegatron.errors import CheckpointError
from tests.checkpoint.lies import largest, lie


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
    TENSOR: "has a header that is no table",
}


@pytest.mark.parametrize("header", LIES)
def test_what_is_wrong_is_said_with_the_name_of_the_tensor(header, tmp_path):
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
    with pytest.raises(CheckpointError, match=LIES[header]):
        read_header(tmp_path / "file")


def test_the_largest_headers_are_refused(tmp_path):
    for name, content in largest().items():
        assert refused(tmp_path / name, content), name
    for short in (b"1234567", b""):
        assert refused(tmp_path / "short", short)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none")
