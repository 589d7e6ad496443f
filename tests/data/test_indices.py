"""Index arrays: the stored vectors, a slow walk, epoch after epoch, and the cache that many ranks share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data import gpt_dataset
from minimegatron.data.blend import BlendedDataset
from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.indices import Epochs, build_sample_indices, cached_arrays, count_epochs
from minimegatron.data.packing import PackedDataset
from minimegatron.data.publish import build_once, locked
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import DataError, DeadlineError
from tests.data.test_gpt_dataset import counting
from tests.data.test_indexed import write

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "data_indices.json").read_text())
LENGTHS = np.array(GOLDEN["lengths"], dtype=np.int32)


def walk(lengths, document_index, samples, s):
    """The slow twin: read s + 1 tokens, step back by one, note where that is."""
    places = [(i, offset) for i, document in enumerate(document_index) for offset in range(lengths[document])]
    return [(0, 0)] + [places[k * s] for k in range(1, samples + 1)]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["num_samples"]))
def test_the_stored_vectors(case):
    found = build_sample_indices(LENGTHS, np.arange(6), case["num_samples"], GOLDEN["sequence_length"], GOLDEN["seed"])
    assert found.document_index.tolist() == case["document_index"]
    assert found.shuffle_index.tolist() == case["shuffle_index"]
    assert found.sample_index.tolist() == case["sample_index"]
    stream = np.concatenate([np.split(np.arange(35), np.cumsum(LENGTHS)[:-1])[d] for d in found.document_index])
    first = int(found.shuffle_index[0]) * 4
    assert stream[first : first + 4].tolist() == case["tokens"]
    assert stream[first + 1 : first + 5].tolist() == case["labels"]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 1),
    st.integers(1, 9),
    st.integers(0, 40) | st.none(),
    st.integers(0, 2**32 - 1),
)
def test_any_corpus(lengths, s, num_samples, seed):
    lengths, documents = np.array(lengths, dtype=np.int32), np.arange(len(lengths))
    tokens = int(lengths.sum())
    epochs = count_epochs(tokens, num_samples, s)
    if epochs * tokens - 1 < s:
        with pytest.raises(DataError, match="make no sample"):
            build_sample_indices(lengths, documents, num_samples, s, seed)
        return
    found = build_sample_indices(lengths, documents, num_samples, s, seed)
    samples = len(found.shuffle_index)
    assert samples >= (num_samples or 0) and samples == (epochs * tokens - 1) // s
    assert epochs == 1 or (epochs - 1) * tokens < num_samples * s + 1 <= epochs * tokens
    assert np.bincount(found.document_index, minlength=len(lengths)).tolist() == [epochs] * len(lengths)
    assert sorted(found.shuffle_index.tolist()) == list(range(samples))
    assert list(map(tuple, found.sample_index.tolist())) == walk(lengths, found.document_index, samples, s)
    again = build_sample_indices(lengths, documents, num_samples, s, seed)
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize(
    "num_samples, separate", [(8, False), (9, True), (13, True), (14, False), (15, False), (16, False), (18, True)]
)
def test_a_last_epoch_that_is_used_in_part_comes_last(num_samples, separate):
    """35 tokens give 8 samples an epoch; below 80 % of 8 in the last epoch, that epoch is shuffled by itself."""
    found = build_sample_indices(LENGTHS, np.arange(6), num_samples, 4, 7)
    epochs = len(found.document_index) // 6
    before = ((epochs - 1) * 35 - 1) // 4
    last_is_whole = sorted(found.document_index[-6:].tolist()) == list(range(6)) and epochs > 1
    assert (last_is_whole and set(found.shuffle_index[:before].tolist()) == set(range(before))) == separate


def test_a_split_without_tokens_is_refused():
    with pytest.raises(DataError, match="no token"):
        build_sample_indices(LENGTHS, np.arange(0), 4, 4, 1)


def test_a_subset_of_documents_is_all_that_is_read():
    found = build_sample_indices(LENGTHS, np.array([3, 5]), 100, 4, 1)
    assert set(found.document_index.tolist()) == {3, 5}


# ---------------------------------------------------------------------------------------------- epoch after epoch


CONFIG = GPTDatasetConfig(4, NullTokenizer(999))


def read(epochs: Epochs, k: int) -> tuple[tuple[int, int], ...]:
    """(document, place in it) of each token of sample k."""
    block, i = epochs.find(k)
    (first, offset), (last, end) = block.sample_index[i : i + 2].tolist()
    found = []
    for position in range(first, last + 1):
        document = int(block.document_index[position])
        stop = end + 1 if position == last else int(epochs.lengths[document])
        found += [(document, place) for place in range(offset, stop)]
        offset = 0
    return tuple(found)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(any),
    st.integers(1, 30),
    st.integers(1, 40) | st.none(),
    st.integers(0, 2**32 - 1),
)
def test_every_token_of_every_epoch_once_and_no_epoch_before_the_one_before(lengths, s, joint, seed):
    documents, lengths = np.arange(len(lengths)), np.array(lengths)
    epochs = Epochs(lengths, documents, s, seed, joint)
    last = epochs.first + 5
    orders = [epochs.block(0).document_index, *(epochs._shuffled(e)[0] for e in range(epochs.first, last))]
    stream = [(int(d), place) for order in orders for d in order for place in range(lengths[d])]
    assert len(stream) == last * epochs.tokens
    at = {0: 0}
    for epoch in range(epochs.first, last + 1):  # what ends in so many epochs
        first, end = at[max(at)], epochs.samples(epoch)
        found = sorted(read(epochs, k) for k in range(first, end))
        assert found == sorted(tuple(stream[i * s : i * s + s + 1]) for i in range(first, end))
        at[epoch] = end
    again = Epochs(lengths, documents, s, seed, joint)
    for k in reversed(range(at[last])):  # in any order
        assert read(again, k) == read(epochs, k)


@pytest.mark.parametrize("seed", range(3))
def test_one_epoch_is_megatrons_and_several_begin_with_it(seed):
    lengths = np.random.RandomState(seed).randint(1, 40, 30)
    one = build_sample_indices(lengths, np.arange(30), None, 7, seed)
    block = Epochs(lengths, np.arange(30), 7, seed).block(0)
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(one, block, strict=True))
    joint = Epochs(lengths, np.arange(30), 7, seed, joint=300)
    theirs = build_sample_indices(lengths, np.arange(30), 300, 7, seed)
    assert all((a == b).all() for a, b in zip(theirs, joint.block(0), strict=True))
    assert count_epochs(int(lengths.sum()), 300, 7) == joint.first > 1


def test_each_epoch_has_an_order_of_its_own_and_the_seed_is_in_it():
    made = [Epochs(np.full(30, 9), np.arange(30), 7, seed) for seed in (1, 2)]
    assert len({tuple(epochs.block(e).shuffle_index) for epochs in made for e in range(4)}) == 8
    assert len({tuple(epochs._shuffled(e)[0]) for epochs in made for e in range(4)}) == 8


def corpora(folder) -> list[IndexedDataset]:
    return [
        IndexedDataset(write(folder / name, [[list(range(first + 9 * d, first + 9 * d + 9))] for d in range(count)]))
        for name, count, first in (("a", 4, 0), ("b", 7, 100))
    ]


def of_one(low, size):
    return GPTDataset(low[0], np.arange(4), size, CONFIG)


def of_a_blend(low, size):
    parts = [GPTDataset(one, np.arange(len(one)), size, CONFIG) for one in low]
    return BlendedDataset(parts, [0.7, 0.3], size)


def packed(low, size):
    return PackedDataset(low[1], np.arange(7), size, CONFIG)


@pytest.mark.parametrize("made", [of_one, of_a_blend, packed])
@pytest.mark.parametrize("shorter", [8, 30])
def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(tmp_path, made, shorter):
    low = corpora(tmp_path)
    short, long = made(low, shorter), made(low, 200)
    assert len(long) >= 200
    for k in range(shorter):
        assert (short[k]["tokens"] == long[k]["tokens"]).all()


@pytest.mark.parametrize("made", [of_one, of_a_blend, packed])
def test_a_hundred_million_epochs_need_the_memory_of_one(tmp_path, made):
    low = corpora(tmp_path)
    tracemalloc.start()
    dataset = made(low, 300_000_000)
    assert len(dataset) >= 300_000_000
    dataset[0], dataset[20]
    assert tracemalloc.get_traced_memory()[1] < 32_000_000, "an order of all of them would be a gigabyte"
    tracemalloc.stop()
    total = sum(dataset.read_epochs(300_000_000).values())
    assert total > 20_000_000


def test_what_was_read_is_let_go(tmp_path):
    low = corpora(tmp_path)
    one, blend = of_one(low, 10_000), of_a_blend(low, 100_000)
    for k in range(0, 1000, 9):
        one[k]
    for k in range(0, 100_000, 8000):
        blend[k]
    assert len(one.epochs._blocks) == 2 == len(blend._blocks)


def test_when_an_epoch_begins(tmp_path):
    low = corpora(tmp_path)
    one = of_one(low, 40)  # 36 tokens: samples 0 to 7, 8 to 16, 17 to 25
    assert [one.begun(0, 8), one.begun(0, 9), one.begun(8, 9), one.begun(9, 17), one.begun(9, 27)] == [
        {}, {one.name: 1}, {one.name: 1}, {}, {one.name: 3}
    ]  # fmt: skip
    blend = of_a_blend(low, 40)
    datasets, samples = blend.draws(0, 40)
    at = next(n for n in range(40) if datasets[n] == 0 and samples[n] == 8)
    assert blend.begun(0, at) == {} and blend.begun(at, at + 1) == {one.name: 1}
    read = blend.read_epochs(40)
    assert read == {one.name: pytest.approx(28 * 4 / 36), blend.datasets[1].name: pytest.approx(12 * 4 / 63)}


# ----------------------------------------------------------------------------------------------------- the cache


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


def test_four_ranks_at_once_build_once(tmp_path):
    ranks = [start(tmp_path, 0) for _ in range(4)]
    digests = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len(digests) == 1 and len(digests.pop()) == 65
    assert len([name for name in os.listdir(tmp_path) if name.startswith("built-by")]) == 1


@pytest.mark.parametrize("seed", range(2))
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
