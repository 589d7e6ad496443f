"""Blends: shares at every prefix, epochs of small datasets, what is refused."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.blend import (
    BlendedDataset,
    build_blending_indices,
    normalize,
    period,
)
from minimegatron.data.builder import build_datasets, parse_data_path, parse_split, read_data_args, split_documents
from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.tokenizer import ByteTokenizer, NullTokenizer
from minimegatron.errors import ConfigError, DataError
from tests.data.test_indexed import write

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "data_indices.json").read_text())
CONFIG = GPTDatasetConfig(4, NullTokenizer(999))


def test_the_stored_blend():
    stored = GOLDEN["blend"]
    datasets, samples = build_blending_indices(stored["weights"], 12)
    assert datasets.tolist() == stored["dataset_index"] and samples.tolist() == stored["dataset_sample_index"]
    assert (datasets.dtype, samples.dtype) == (np.int16, np.int64)


def naive(weights, size):
    counts, draws = [0] * len(weights), []
    for n in range(size):
        lags = [w * max(n, 1) - c if w else float("-inf") for w, c in zip(weights, counts, strict=True)]
        i = lags.index(max(lags))
        draws.append((i, counts[i]))
        counts[i] += 1
    return draws


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any))
def test_exhaustive_draws_every_sample_once(sizes):
    datasets, samples = build_blending_indices(normalize(sizes), sum(sizes))
    drawn = sorted(zip(datasets.tolist(), samples.tolist(), strict=True))
    assert drawn == [(i, k) for i, size in enumerate(sizes) for k in range(size)]


# ------------------------------------------------------------------------------------ command line


def corpus(folder, name, documents, length=9, first=0):
    return write(folder / name, [[[first + d] * length] for d in range(documents)])


@pytest.mark.parametrize(
    "words, prefixes, weights",
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["0.3", "a", "70", "b"], ["a", "b"], [0.3, 70.0]),
        (["1", "a"], ["a"], [1.0]),
        (["a", "b", "c"], ["a", "b", "c"], None),
    ],
)
def test_data_path_grammar(words, prefixes, weights, tmp_path):
    assert parse_data_path(words) == (prefixes, weights)
    (tmp_path / "args").write_text("\n ".join(words))
    assert read_data_args(tmp_path / "args") == words


@pytest.mark.parametrize("words", [[], ["1", "a", "b", "c"], ["-1", "a"], ["0", "a"], ["nan", "a"], ["inf", "a"]])
def test_data_paths_that_cannot_be_read(words):
    with pytest.raises(ConfigError, match="--data-path"):
        parse_data_path(words)


def test_split_rounds_to_documents():
    stored = GOLDEN["split"]
    parts = [split_documents(part, 6).tolist() for part in parse_split(stored["split"])]
    assert parts == stored["documents"]
    assert parse_split("100,0,0") == [(0.0, 1.0), None, None] and parse_split("1") == [(0.0, 1.0), None, None]


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,2,3,4", "90;10", "-1,2", "1,,2", "1e3", "nan"])
def test_splits_that_cannot_be_read(split):
    with pytest.raises(ConfigError, match="--split"):
        parse_split(split)


def test_one_dataset_is_cut_by_the_split(tmp_path):
    path = corpus(tmp_path, "a", 20)
    train, valid, test = build_datasets(CONFIG, (30, 5, 0), [path], "80,20,0")
    assert {int(i) for k in range(len(train)) for i in train[k]["tokens"]} == set(range(16))
    assert {int(i) for k in range(len(valid)) for i in valid[k]["tokens"]} == set(range(16, 20))
    assert test is None and len(train) >= 30
    assert build_datasets(CONFIG, (30, 0, None), [path], "80,10,10")[1] is None, "no sample is asked for"


def test_a_small_dataset_is_read_for_more_epochs(tmp_path):
    big, small = corpus(tmp_path, "a", 100), corpus(tmp_path, "b", 3, first=500)
    train, *_ = build_datasets(CONFIG, (200, 0, 0), ["0.7", big, "0.3", small], "1,0,0")
    assert isinstance(train, BlendedDataset) and len(train) == 200
    assert [dataset.num_epochs for dataset in train.datasets] == [1, -(-(61 * 4 + 1) // 27)]
    from_small = [bool(train[k]["tokens"][0] >= 500) for k in range(200)]
    assert sum(from_small) == 60 and from_small == (train.draws(0, 200)[0] == 1).tolist()


def test_weight_zero_and_a_single_weighted_dataset(tmp_path):
    a, b = corpus(tmp_path, "a", 30), corpus(tmp_path, "b", 30, first=500)
    train, *_ = build_datasets(CONFIG, (20, 0, 0), ["0", a, "2", b], "1,0,0")
    assert all(int(train[k]["tokens"].min()) >= 500 for k in range(20))
    single, *_ = build_datasets(CONFIG, (20, 0, 0), ["2", b], "1,0,0")
    assert all((train[k]["tokens"] == single[k]["tokens"]).all() for k in range(20))


def test_prefixes_without_weights_are_read_once(tmp_path):
    paths = [corpus(tmp_path, "a", 30), corpus(tmp_path, "b", 10, first=500), corpus(tmp_path, "c", 5, first=700)]
    whole, *_ = build_datasets(CONFIG, (None, 0, 0), paths, "1,0,0")
    assert len(whole) == sum(len(dataset) for dataset in whole.datasets)
    some, *_ = build_datasets(CONFIG, (50, 0, 0), paths, "1,0,0")
    assert len(some) == 50 and (some.draws(0, 50)[0] == whole.draws(0, 50)[0]).all()


def test_a_path_per_split(tmp_path):
    a, b = corpus(tmp_path, "a", 30), corpus(tmp_path, "b", 30, first=500)
    train, valid, test = build_datasets(CONFIG, (10, 5, 5), data_path_per_split=([a], ["1", a, "1", b], None))
    assert isinstance(train, GPTDataset) and isinstance(valid, BlendedDataset) and test is None
    assert len(valid) == 6, "ceil(5 * 0.5) of each"
    with pytest.raises(ConfigError, match="drop one"):
        build_datasets(CONFIG, (10, 5, 5), [a], data_path_per_split=([a], None, None))


def test_data_of_another_tokenizer_is_pointed_out(tmp_path):
    prefix = write(tmp_path / "a", [[[1, 2, 3] * 9]] * 5, tokenizer=NullTokenizer(200))
    with pytest.warns(UserWarning, match="another tokenizer"):
        build_datasets(GPTDatasetConfig(4, ByteTokenizer()), (9, 0, 0), [prefix], "1,0,0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_datasets(CONFIG, (9, 0, 0), [prefix], "1,0,0")


def test_mock_data_needs_no_file():
    train, valid, _ = build_datasets(GPTDatasetConfig(1024, NullTokenizer(999)), (50, 10, 10))
    assert len(train) >= 50 and len(valid) >= 10 and (train[0]["tokens"] != valid[0]["tokens"]).any()


def test_errors_say_which_set_of_which_dataset(tmp_path):
    path = corpus(tmp_path, "a", 3)
    with pytest.raises(DataError, match="valid set has 1 % of 3 documents, which is none") as caught:
        build_datasets(CONFIG, (10, 5, 0), [path], "99,1,0")
    assert caught.value.where == path and caught.value.fix.startswith("--split 2,1 gives it one")
    assert len(build_datasets(CONFIG, (10, 5, 0), [path], "2,1")[1].documents) == 1
    with pytest.raises(DataError, match="make no sample"):
        build_datasets(GPTDatasetConfig(100, NullTokenizer(999)), (None, 0, 0), [path], "1,0,0")
    with pytest.raises(ConfigError, match="number of samples"):
        build_datasets(CONFIG, (None, 0, 0), ["1", path], "1,0,0")
    with pytest.raises(DataError, match="outside the vocabulary"):
        build_datasets(GPTDatasetConfig(4, NullTokenizer(1)), (10, 0, 0), [path], "1,0,0")


def test_a_file_of_prefixes_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"--data-args-path {tmp_path}/none: .*No such file"):
        read_data_args(tmp_path / "none")


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([7, 3], 10), ([0.3, 0.5, 0.35], 23), ([1, 1, 1], 3), ([0.123, 0.5, 0, 0.377], 1000), ([1, 2, 3, 5, 7, 11], 29)],
)
def test_after_whole_periods_the_counts_are_the_shares(tmp_path, monkeypatch, weights, whole):
    """And draws that begin there are those that begin at 0."""
    monkeypatch.setattr("minimegatron.data.blend.BLOCK", 7)
    shares = normalize(weights)
    assert period(shares) == whole
    datasets, samples = build_blending_indices(shares, 4000)
    for end in range(whole, 4000, whole):
        counts = np.bincount(datasets[:end], minlength=len(shares))
        assert np.abs(counts - end * np.array(shares)).max() < 1e-6
    low = GPTDataset(IndexedDataset(corpus(tmp_path, "a", 30)), np.arange(30), 9, CONFIG)
    for first in (3, 1990, 3990):
        found = BlendedDataset([low] * len(shares), weights, 10**9).draws(first, first + 9)
        assert (found[0] == datasets[first : first + 9]).all() and (found[1] == samples[first : first + 9]).all()


def test_shares_without_a_period_and_the_far_end_of_a_long_run(tmp_path):
    assert period(normalize([2**0.5, 1])) is None and period(normalize([1, 2**25])) is None
    low = GPTDataset(IndexedDataset(corpus(tmp_path, "a", 30)), np.arange(30), 9, CONFIG)
    datasets, samples = BlendedDataset([low, low], [0.7, 0.3], 10**9).draws(10**9 - 10, 10**9)
    assert datasets.tolist() == build_blending_indices([0.7, 0.3], 20)[0][10:].tolist()
    assert samples[datasets == 0].tolist() == list(range(699_999_993, 700_000_000))
