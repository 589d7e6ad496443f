"""The cache of index arrays: built once by many, never half, never stale."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from minimegatron.data import gpt_dataset
from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.data.indices import cached_arrays
from minimegatron.data.publish import build_once, locked
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import DataError, DeadlineError
from tests.data.test_gpt_dataset import counting

# A rank: builds the arrays through the cache (slowly, so that the ranks meet) and prints a digest of what it got.
RANK = """
import hashlib, os, sys, time
import numpy as np
from minimegatron.data.indices import cached_arrays
from minimegatron.data.indices import build_sample_indices
folder, seed, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def build():
    open(os.path.join(folder, f"built-by-{os.getpid()}"), "w").close()
    arrays = build_sample_indices(np.full(200, 37, np.int32), np.arange(200), 2000, 11, seed)._asdict()
    for name, array in arrays.items():
        time.sleep(pause)
        yield name, array

class Slow:
    def items(self):
        return build()

arrays = cached_arrays(folder, {"seed": seed}, Slow)
print(hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())).hexdigest())
"""


def start(folder, seed, pause=0.05):
    command = [sys.executable, "-c", RANK, str(folder), str(seed), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def caches(folder):
    return [name for name in os.listdir(folder) if len(name) == 32]


@pytest.mark.parametrize("seed", range(3))
def test_four_ranks_at_once_build_once(tmp_path, seed):
    ranks = [start(tmp_path, seed) for _ in range(4)]
    digests = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len(digests) == 1 and len(digests.pop()) == 65
    assert len([name for name in os.listdir(tmp_path) if name.startswith("built-by")]) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_builder_leaves_nothing_that_is_used(tmp_path, seed):
    """SIGKILL at a random moment of the build; whoever comes next builds it whole."""
    victim = start(tmp_path, seed, pause=0.2)
    deadline = time.monotonic() + 30
    while not any(name.startswith("built-by") for name in os.listdir(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.7 * np.random.RandomState(seed).rand())
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=30)
    got = start(tmp_path, seed, pause=0).communicate(timeout=30)[0]
    clean = tmp_path / "clean"
    clean.mkdir()
    assert got == start(clean, seed, pause=0).communicate(timeout=30)[0]
    assert len(caches(tmp_path)) == 1 and not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    values = {"a": np.arange(50), "b": np.arange(6.0).reshape(2, 3)}
    build_count = []

    def build():
        build_count.append(1)
        return values

    cached_arrays(str(tmp_path), {"x": 1}, build)
    again = cached_arrays(str(tmp_path), {"x": 1}, build)
    assert len(build_count) == 1 and (again["a"] == values["a"]).all() and not again["a"].flags.writeable
    (home,) = (tmp_path / name for name in caches(tmp_path))
    path = home / ("manifest.json" if damage == "manifest" else "a.npy")
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[-5] ^= 4
        case "cut":
            del data[-8:]
        case "manifest":
            data = bytearray(b"{")
    path.unlink() if damage == "remove" else path.write_bytes(data)
    with pytest.warns(UserWarning, match="damaged and built again"):
        repaired = cached_arrays(str(tmp_path), {"x": 1}, build)
    assert len(build_count) == 2 and all((repaired[name] == values[name]).all() for name in values)
    cached_arrays(str(tmp_path), {"x": 2}, build)
    assert len(build_count) == 3, "another description is another cache"


@pytest.fixture
def keeps_all(monkeypatch):
    monkeypatch.setattr(gpt_dataset, "CACHED_FROM", 0)


def test_new_data_under_an_old_name_is_not_read_with_the_old_index(tmp_path, keeps_all):
    config = GPTDatasetConfig(4, NullTokenizer(999), path_to_cache=str(tmp_path / "cache"))
    first = GPTDataset(counting(tmp_path, [10, 10]), np.arange(2), None, config).epochs.block(0)
    second = GPTDataset(counting(tmp_path, [4, 16]), np.arange(2), None, config).epochs.block(0)
    assert first.sample_index.tolist() != second.sample_index.tolist()
    beside = GPTDatasetConfig(4, NullTokenizer(999))
    GPTDataset(counting(tmp_path), np.arange(6), None, beside)
    assert (tmp_path / "x.cache").is_dir()


def test_what_the_indices_depend_on_is_in_their_name(tmp_path, keeps_all):
    low = counting(tmp_path)
    keys = set()
    cases = ((4, 1, 6, 9, 0), (5, 1, 6, 9, 0), (4, 2, 6, 9, 0), (4, 1, 5, 9, 0), (4, 1, 6, 8, 0), (4, 1, 6, 9, 2))
    for s, seed, documents, joint, epoch in cases:
        config = GPTDatasetConfig(s, NullTokenizer(999), random_seed=seed, path_to_cache=str(tmp_path / "cache"))
        made = GPTDataset(low, np.arange(documents), 9, config, joint).epochs.block(epoch)
        again = GPTDataset(low, np.arange(documents), 9, config, joint).epochs.block(epoch)
        assert all((a == b).all() for a, b in zip(made, again, strict=True))
        keys |= set(caches(tmp_path / "cache"))
    assert len(keys) == len(cases)


def test_small_arrays_are_not_kept(tmp_path):
    GPTDataset(counting(tmp_path), np.arange(6), 100, GPTDatasetConfig(4, NullTokenizer(999)))
    assert not (tmp_path / "x.cache").exists()


def test_a_lock_that_is_held_too_long_names_its_holder(tmp_path):
    path = str(tmp_path / "lock")
    with locked(path), pytest.raises(DeadlineError, match=f"process {os.getpid()}"), locked(path, deadline_s=0.05):
        pass
    with locked(path, deadline_s=0.05):
        pass


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path):
    def fail(stage):
        (open(os.path.join(stage, "half"), "w")).close()
        raise ValueError("no")

    with pytest.raises(ValueError):
        build_once(str(tmp_path / "x"), fail)
    assert os.listdir(tmp_path) == ["x.lock"]
    build_once(str(tmp_path / "x"), lambda stage: open(os.path.join(stage, "whole"), "w").close())
    assert os.listdir(tmp_path / "x") == ["whole"]


def test_a_cache_folder_that_is_a_file_is_a_data_error(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(DataError, match="may write to"):
        cached_arrays(str(tmp_path / "f"), {}, dict)
