"""Masks of a batch against a loop, token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.gpt_dataset import make_batch
from minimegatron.layers.attention.mask import cu_seqlens

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
