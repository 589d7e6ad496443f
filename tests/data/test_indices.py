"""The three index arrays: the stored vectors, a slow walk, and what must hold for any corpus."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.indices import build_sample_indices, count_epochs
from minimegatron.errors import DataError

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
