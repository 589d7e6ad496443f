"""Sample k is a function of the seed and its epoch: longer runs begin as shorter ones do, and need no more memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.blend import BlendedDataset
from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.indices import Epochs, build_sample_indices, count_epochs
from minimegatron.data.packing import PackedDataset
from minimegatron.data.tokenizer import NullTokenizer
from tests.data.test_gpt_dataset import counting
from tests.data.test_indexed import write

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
@pytest.mark.parametrize("shorter", [3, 8, 9, 30])
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
    assert len(one.epochs._held) == 2 == len(blend._held)


def test_the_last_sample_of_many_is_read_at_once(tmp_path):
    dataset = of_one(corpora(tmp_path), 300_000_000)
    tokens = dataset[len(dataset) - 1]["tokens"]
    assert sorted(set(tokens.tolist())) == sorted(tokens.tolist()) and tokens.max() < 36


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


def test_documents_counted_for_a_run_are_those_of_the_golden_file(tmp_path):
    assert GPTDataset(counting(tmp_path), np.arange(6), 20, CONFIG).num_epochs == 3
