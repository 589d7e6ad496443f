"""Samples: the right tokens in the right order, ids refused, pad and eod kept apart, mock data."""

import json
import types
from pathlib import Path

import numpy as np
import pytest

from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import ConfigError, DataError
from tests.data.test_indexed import write

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "data_indices.json").read_text())


def counting(folder, lengths=tuple(GOLDEN["lengths"])):
    """Documents of these lengths that hold 0, 1, 2 ... consecutively."""
    starts = np.cumsum([0, *lengths])
    documents = [[list(range(a, b))] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    return IndexedDataset(write(folder / "x", documents))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["num_samples"]))
def test_the_stored_samples(tmp_path, case):
    config = GPTDatasetConfig(4, NullTokenizer(999), random_seed=GOLDEN["seed"])
    dataset = GPTDataset(counting(tmp_path), np.arange(6), case["num_samples"], config, joint=case["num_samples"])
    assert dataset[0]["tokens"].tolist() == case["tokens"] and dataset[0]["labels"].tolist() == case["labels"]
    assert dataset.num_epochs == len(case["document_index"]) // 6
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_a_window_of_the_shuffled_stream(tmp_path, seed):
    rng = np.random.RandomState(seed)
    lengths, s = rng.randint(1, 30, 25), int(rng.randint(1, 20))
    low = counting(tmp_path, lengths)
    dataset = GPTDataset(low, np.arange(25), 60, GPTDatasetConfig(s, NullTokenizer(999), random_seed=seed), 60)
    indices = dataset.epochs.block(0)
    stream = np.concatenate([low[int(d)] for d in indices.document_index])
    batch = dataset.batch(range(len(dataset)))
    for k in range(len(dataset)):
        i = int(indices.shuffle_index[k])
        assert batch["tokens"][k].tolist() == stream[i * s : (i + 1) * s].tolist()
        assert batch["labels"][k].tolist() == stream[i * s + 1 : (i + 1) * s + 1].tolist()
    inputs = sorted(batch["tokens"].flatten().tolist())
    assert inputs == sorted(stream[: len(dataset) * s].tolist()), "each token is an input once, but for the tail"


@pytest.mark.parametrize("seed", range(4))
def test_an_id_outside_the_vocabulary_is_refused_when_read(tmp_path, seed):
    """A file too large to scan on opening (here: not verified) is checked sample by sample."""
    low = counting(tmp_path)
    place = int(np.random.RandomState(seed).randint(1, 33))
    raw = np.fromfile(low.bin_path, np.uint16)
    raw[place] = 60000
    raw.tofile(low.bin_path)
    low = IndexedDataset(low.prefix, verify=False, vocab_size=1000)
    dataset = GPTDataset(low, np.arange(6), 8, GPTDatasetConfig(4, NullTokenizer(999)))
    bad = 0
    for k in range(len(dataset)):
        try:
            dataset[k]
        except DataError as error:
            bad += 1
            assert "token id 60000 is outside" in error.what and error.where == f"{low.bin_path}, byte {2 * place}"
    assert bad >= 1


def test_pad_equal_to_eod_is_refused():
    tokenizer = types.SimpleNamespace(vocab_size=10, eod=9, pad=9, bos=None, identity="x")
    with pytest.raises(ConfigError, match="never learn to stop"):
        GPTDatasetConfig(4, tokenizer)
    with pytest.raises(ConfigError, match="sequence_length"):
        GPTDatasetConfig(0, NullTokenizer(9))


def test_mock_data_counts_and_is_the_same_every_time():
    config = GPTDatasetConfig(64, NullTokenizer(100), random_seed=3)
    first, second = (MockGPTDataset(np.arange(50), 40, config) for _ in range(2))
    one, two = first.batch(range(40)), second.batch(range(40))
    assert all((one[name] == two[name]).all() for name in one)
    tokens, labels = one["tokens"], one["labels"]
    inside = (tokens != 100) & (labels != 100)
    assert ((tokens[inside] + 1) % 101 == labels[inside]).float().mean() > 0.98, "the next id is this one plus one"
