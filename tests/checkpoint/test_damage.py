"""A byte, a shard or an entry that is not what was written: refused, and the file is named. Nothing is executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from minimegatron.checkpoint.commit import folder_of
from minimegatron.checkpoint.manifest import NAME
from minimegatron.errors import CheckpointError
from tests.checkpoint.runs import exact, loaded, save_steps
from tests.checkpoint.test_crash import hidden

SHARDS = [f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
FILES = [NAME, *SHARDS]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "root"
    ranks(2).run(save_steps, str(root), [1, 2], False)
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


def refused(root: Path, step: int = 2) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded(root, step)
    return str(caught.value)


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte(saved, name, where, mask):
    path = folder_of(saved, 2) / name
    text = path.read_bytes()
    changed = bytearray(text)
    changed[int(where * len(text))] ^= mask
    try:
        path.write_bytes(changed)
        assert str(path) in refused(saved)
    finally:
        path.write_bytes(text)


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.sampled_from(FILES), st.floats(0, 1), st.binary(max_size=9), st.integers(0, 9))
def test_bytes_put_in_or_taken_out(saved, name, where, more, fewer):
    path = folder_of(saved, 2) / name
    text = path.read_bytes()
    at = int(where * len(text))
    changed = text[:at] + more + text[at + fewer :]
    hypothesis.assume(changed != text)
    try:
        path.write_bytes(changed)
        assert str(path) in refused(saved)
    finally:
        path.write_bytes(text)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.parents[2] / path.name)
    path.symlink_to(path.parents[2] / path.name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [os.unlink, lambda p: p.write_bytes(b""), directory, link])
def test_a_file_that_is_gone_or_something_else(root, name, change):
    path = folder_of(root, 2) / name
    change(path)
    assert str(path) in refused(root)


def test_a_foreign_file_and_a_shard_twice(root):
    folder = folder_of(root, 2)
    (folder / "notes.txt").write_text("mine")
    shutil.copy(folder / SHARDS[0], folder / "shard-00002-of-00002.safetensors")
    assert "not part of the checkpoint: notes.txt, shard-00002-of-00002.safetensors" in refused(root)


def test_a_shard_of_another_step_or_in_anothers_place(root):
    path = folder_of(root, 2) / SHARDS[0]
    shutil.copy(folder_of(root, 1) / SHARDS[0], path)
    assert str(path) in refused(root)


def test_a_folder_with_the_name_of_another_step(root):
    folder_of(root, 1).rename(folder_of(root, 9))
    assert "manifest of step 1" in refused(root, 9) and str(folder_of(root, 9)) in refused(root, 9)


def forged(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest with a change and a good hash: a program has made it, and not ours."""
    path = folder_of(root, 2) / NAME
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")) + "\n"
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(body, sort_keys=True, separators=(",", ":")) + "\n")


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda b: b.update(version=3),
    "no version": lambda b: b.pop("version"),
    "another step": lambda b: b.update(step=3),
    "another run": lambda b: b.update(run_id="other"),
    "a step that is no number": lambda b: b.update(step="x"),
    "no files": lambda b: b.update(files={}),
    "files that are no table": lambda b: b.update(files=[]),
    "a path out of the folder": lambda b: b["files"].update({"../outside": [0, "0"]}),
    "a hidden file": lambda b: b["files"].update({".hidden": [0, "0"]}),
    "the manifest itself": lambda b: b["files"].update({NAME: [0, "0"]}),
    "a file that is not there": lambda b: b["files"].update({"shard-9.safetensors": [0, "0"]}),
    "another hash": lambda b: b["files"][SHARDS[0]].__setitem__(1, "xxh3_128:" + "0" * 32),
    "another hash of version 1": lambda b: b["files"][SHARDS[0]].__setitem__(1, "0" * 64),
    "a hash of no kind that there is": lambda b: b["files"][SHARDS[0]].__setitem__(1, "md5:" + "0" * 32),
    "another length": lambda b: b["files"][SHARDS[0]].__setitem__(0, 1),
    "a region fewer": lambda b: b["tensors"]["weight"][2].pop(),
    "a region twice": lambda b: b["tensors"]["weight"][2].append(b["tensors"]["weight"][2][0]),
    "one region in the place of another": lambda b: b["tensors"]["weight"][2].__setitem__(
        0, b["tensors"]["weight"][2][1]
    ),
    "a region outside": lambda b: b["tensors"]["weight"][2][0].__setitem__(0, [9, 0]),
    "a negative offset": lambda b: b["tensors"]["weight"][2][0].__setitem__(0, [-1, 0]),
    "an offset that is a text": lambda b: b["tensors"]["weight"][2][0].__setitem__(0, ["0", 0]),
    "an offset more": lambda b: b["tensors"]["weight"][2][0].__setitem__(0, [0, 0, 0]),
    "another key": lambda b: b["tensors"]["weight"][2][0].__setitem__(3, "bias@0"),
    "a region in an unknown file": lambda b: b["tensors"]["weight"][2][0].__setitem__(2, "x"),
    "another dtype": lambda b: b["tensors"]["weight"].__setitem__(0, "F64"),
    "an unknown dtype": lambda b: b["tensors"]["weight"].__setitem__(0, "X"),
    "a shape without end": lambda b: b["tensors"]["weight"].__setitem__(1, [1 << 62, 1 << 62]),
    "a tensor that is a number": lambda b: b["tensors"].update(weight=1),
    "no state": lambda b: b.pop("state"),
}


def test_a_checkpoint_of_version_1_is_read_and_its_damage_found(root):
    """Its manifest has the digits of SHA-256 alone."""
    folder = folder_of(root, 2)

    def older(body: dict[str, Any]) -> None:
        body["version"] = 1
        for name, entry in body["files"].items():
            entry[1] = hashlib.sha256((folder / name).read_bytes()).hexdigest()

    forged(root, older)
    assert exact(root) == [1, 2]
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert str(path) in refused(root)


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_manifest(root, what):
    forged(root, FORGERIES[what])
    assert str(folder_of(root, 2)) in refused(root)


class Planted:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return Path.touch, (self.sentinel,)


@pytest.mark.parametrize("name", [NAME, SHARDS[0], ".metadata", "common.pt", "x.npy", ".lock"])
def test_a_planted_pickle_never_runs(ranks, root, tmp_path, name):
    sentinel = tmp_path / "it ran"
    for folder in (folder_of(root, 2), root):
        if name.endswith(".npy"):
            buffer = io.BytesIO()
            np.save(buffer, np.array([Planted(sentinel)], dtype=object), allow_pickle=True)
            (folder / name).write_bytes(buffer.getvalue())
        elif name.endswith((".pt", ".bin")):
            torch.save(Planted(sentinel), folder / name)
        else:
            (folder / name).write_bytes(pickle.dumps(Planted(sentinel)))
    assert name in refused(root)
    shutil.rmtree(folder_of(root, 2))
    ranks(2).run(save_steps, str(root), [3], False)
    assert exact(root) == [1, 3] and not sentinel.exists()
    pickle.loads(pickle.dumps(Planted(sentinel)))
    assert sentinel.exists(), "the plant does what it should"


def test_what_a_dead_run_left_of_the_same_step_is_not_in_the_new_checkpoint(ranks, root):
    left = root / ".iter_0000003.deadrun"
    shutil.copytree(folder_of(root, 2), left)
    (root / ".iter_0000001.retired").mkdir()
    ranks(2).run(save_steps, str(root), [3], False)
    assert exact(root) == [2, 3] and hidden(root) == []
