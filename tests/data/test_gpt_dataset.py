"""Samples: the right tokens in the right order, ids refused, mock data; masks of a batch against a loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset, make_batch
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import DataError
from minimegatron.layers.attention.mask import cu_seqlens
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


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(2))
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


def test_mock_data_counts_and_is_the_same_every_time():
    config = GPTDatasetConfig(64, NullTokenizer(100), random_seed=3)
    first, second = (MockGPTDataset(np.arange(50), 40, config) for _ in range(2))
    one, two = first.batch(range(40)), second.batch(range(40))
    assert all((one[name] == two[name]).all() for name in one)
    tokens, labels = one["tokens"], one["labels"]
    inside = (tokens != 100) & (labels != 100)
    assert ((tokens[inside] + 1) % 101 == labels[inside]).float().mean() > 0.98, "the next id is this one plus one"


# ---------------------------------------------------------------------- Masks of a batch against a loop, token by token


EOD, PAD = 9, 8


def loop(text, reset_position_ids, eod_mask_loss):
    """The slow twin for one sample."""
    tokens, labels = text[:-1], text[1:]
    mask, positions, documents, position, document = [], [], [], 0, 0
    for token, label in zip(tokens, labels, strict=True):
        mask.append(0.0 if label == PAD or (eod_mask_loss and token == EOD) else 1.0)
        positions.append(position)
        documents.append(document)
        position, document = (position + 1, document) if token != EOD else (0, document + 1)
    if not reset_position_ids:
        positions = list(range(len(tokens)))
    return mask, positions, documents


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=9, max_size=9), min_size=1, max_size=4), st.booleans(), st.booleans()
)
def test_against_the_loop(text, reset_position_ids, eod_mask_loss):
    batch = make_batch(
        torch.tensor(text),
        EOD,
        PAD,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=True,
        eod_mask_loss=eod_mask_loss,
    )
    for row, ids in enumerate(text):
        mask, positions, documents = loop(ids, reset_position_ids, eod_mask_loss)
        assert batch["loss_mask"][row].tolist() == mask
        assert batch["position_ids"][row].tolist() == positions
        assert batch["document_ids"][row].tolist() == documents
        assert batch["tokens"][row].tolist() == [0 if i == PAD else i for i in ids[:-1]]
        assert batch["labels"][row].tolist() == [0 if i == PAD else i for i in ids[1:]]


def test_the_table_of_the_module():
    text = torch.tensor([[1, 2, EOD, 3, 4, 5, EOD, 6, 7]])
    batch = make_batch(text, EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 1, 1, 0, 1]]
    assert {name: tensor.dtype for name, tensor in batch.items() if name != "loss_mask"} == dict.fromkeys(
        ("tokens", "labels", "position_ids", "document_ids"), torch.int64
    )
    assert batch["loss_mask"].dtype == torch.float32


def test_predicting_the_end_of_a_document_is_learned():
    """The pad trap: the loss where the label is the end of document counts unless `pad` is that id."""
    text = torch.tensor([[1, 2, EOD, 3, 4]])
    assert make_batch(text, EOD)["loss_mask"].tolist() == [[1, 1, 1, 1]]
    assert make_batch(text, EOD, eod_mask_loss=True)["loss_mask"].tolist() == [[1, 1, 0, 1]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_cu_seqlens_are_the_documents_end_to_end(batch_size):
    documents = torch.tensor([[0, 0, 0, 1, 1, 2]]).expand(batch_size, -1)
    boundaries, longest = cu_seqlens(documents)
    assert boundaries.tolist() == [6 * b + i for b in range(batch_size) for i in (0, 3, 5)] + [6 * batch_size]
    assert boundaries.dtype == torch.int32 and longest == 3
