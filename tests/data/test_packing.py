"""Packed samples: every pair once, nothing seen across a border, and what a neighbour may change: nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch, gather_tokens
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.data.builder import build_datasets
from minimegatron.data.gpt_dataset import GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.packing import PackedDataset, best_fit_decreasing, pieces_of
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import DataError
from minimegatron.models.decoder import build_model
from tests.data.test_indexed import write
from tests.thorough import mostly_slow

LENGTHS = [5, 1, 9, 3, 14, 2, 2, 7, 30, 4]


def corpus(folder: Any, lengths: list[int] = LENGTHS) -> IndexedDataset:
    """Documents of these lengths that hold 0, 1, 2 ... consecutively, so that every token names its place."""
    starts = np.cumsum([0, *lengths]).tolist()
    return IndexedDataset(write(folder / "x", [[list(range(a, b))] for a, b in zip(starts, starts[1:], strict=False)]))


def packed(folder: Any, s: int = 12, num_samples: int | None = None, **options: Any) -> PackedDataset:
    config = GPTDatasetConfig(s, NullTokenizer(999), sequence_packing=True, **options)
    return PackedDataset(corpus(folder), np.arange(len(LENGTHS)), num_samples, config)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 20))
def test_every_pair_is_in_one_piece(lengths, s):
    pieces = pieces_of(np.array(lengths, dtype=np.int32), np.arange(len(lengths)), s)
    seen = [(d, offset + i) for d, offset, n in pieces.tolist() for i in range(n)]
    assert sorted(seen) == [(d, i) for d, length in enumerate(lengths) for i in range(length - 1)]
    assert all(1 <= n <= s for n in pieces[:, 2].tolist())


def fewest(sizes: list[int]) -> int:
    """Bins of 16 that any packing needs (the bound L2 of Martello and Toth): of items above 8 no two share one, and
    those of t or more fit beside none above 16 - t."""
    most = 0
    for t in range(1, 9):
        alone, large = (
            sum(test(w) for w in sizes) for test in (lambda w, t=t: w > 16 - t, lambda w, t=t: 8 < w <= 16 - t)
        )
        room = 16 * large - sum(w for w in sizes if 8 < w <= 16 - t)
        small = sum(w for w in sizes if t <= w <= 8)
        most = max(most, alone + large + max(0, -(-(small - room) // 16)))
    return most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=200))
def test_bins_are_never_too_full_and_few(sizes):
    array = np.array(sizes)
    bins = best_fit_decreasing(array, 16)
    loads = np.bincount(bins, weights=array)
    assert loads.max() <= 16 and loads.min() > 0
    assert len(loads) <= 11 * fewest(sizes) / 9 + 1  # what best fit decreasing needs at most, over the best packing
    again = best_fit_decreasing(array, 16)
    assert np.array_equal(bins, again)


def test_no_token_is_lost_or_seen_twice(tmp_path):
    dataset = packed(tmp_path)
    batch = dataset.batch(range(len(dataset)))
    counted = batch["loss_mask"].bool()
    pairs = sorted(zip(batch["tokens"][counted].tolist(), batch["labels"][counted].tolist(), strict=True))
    starts = np.cumsum([0, *LENGTHS])
    wanted = [(i, i + 1) for a, b in zip(starts, starts[1:], strict=False) for i in range(a, b - 1)]
    assert pairs == wanted
    assert counted.sum().item() / counted.numel() == dataset.fill > 0.85


def test_ids_and_positions_begin_anew_in_every_piece(tmp_path):
    dataset = packed(tmp_path)
    for sample in dataset:
        ids, positions, mask = (sample[n].tolist() for n in ("document_ids", "position_ids", "loss_mask"))
        assert ids == sorted(ids) and ids[0] == 0
        for i in range(12):
            begins = i == 0 or ids[i] != ids[i - 1]
            assert positions[i] == (0 if begins else positions[i - 1] + 1)
            if mask[i] and not begins:
                assert sample["tokens"][i] == sample["tokens"][i - 1] + 1
        padding = [i for i in range(12) if not mask[i]]
        assert padding == list(range(12 - len(padding), 12)) and len({ids[i] for i in padding}) <= 1
        assert not padding or ids[padding[0]] == ids[padding[0] - 1] + 1


def test_epochs_have_all_samples_in_another_order(tmp_path):
    one = len(packed(tmp_path))
    dataset = packed(tmp_path, num_samples=one + 1)
    assert len(dataset) == 2 * one and dataset.num_epochs == 2
    epochs = [[tuple(dataset[k]["tokens"].tolist()) for k in range(e * one, (e + 1) * one)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert [tuple(dataset[k]["tokens"].tolist()) for k in range(one)] == epochs[0], "the same every time"


def test_an_id_outside_the_vocabulary_and_a_set_without_pairs_are_refused(tmp_path):
    dataset = packed(tmp_path)
    small = PackedDataset(dataset.dataset, np.arange(10), None, GPTDatasetConfig(12, NullTokenizer(40)))
    with pytest.raises(DataError, match="outside the vocabulary"):
        small.batch(range(len(small)))
    with pytest.raises(DataError, match="less than two tokens"):
        PackedDataset(dataset.dataset, np.array([1]), None, dataset.config)


def test_a_blend_of_packed_sets(tmp_path):
    corpus(tmp_path)
    config = GPTDatasetConfig(12, NullTokenizer(999), sequence_packing=True)
    train, _, _ = build_datasets(config, (6, 0, 0), ["1", str(tmp_path / "x"), "2", str(tmp_path / "x")], "1,0,0")
    assert train is not None
    batch = train.batch([0, 1, 2, 3, 4, 5])
    assert batch["tokens"].shape == batch["document_ids"].shape == (6, 12)
    assert (batch["labels"] - batch["tokens"])[batch["loss_mask"].bool()].eq(1).all()


# ------------------------------------------------------------------------------------------------- influence


def logits(batch: dict[str, torch.Tensor], parallel: ParallelConfig, backend: str) -> torch.Tensor:
    """[b, s, V] of the whole batch, on every rank."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    config = TransformerConfig(**sizes, vocab_size=128, position_embedding_type="rope", attention_backend=backend)
    mesh = Mesh.build(parallel)
    model = build_model(config, mesh, seed=0)
    with torch.no_grad():
        mine = cut_batch(batch, mesh)
        out = model(mine["tokens"], mine["position_ids"], document_ids=mine["document_ids"])
    return gather_tokens(out.transpose(0, 1), mesh, 1)


def influence(rank: int, world: int, batch: dict[str, torch.Tensor], kind: str, backend: str) -> list[str]:
    """Perturb each document in turn; what is wrong with what changes."""
    parallel = ParallelConfig(context_parallel_size=world, cp_comm_type=kind)
    before, wrong = logits(batch, parallel, backend), []
    for number in batch["document_ids"].unique().tolist():
        own = batch["document_ids"] == number
        tokens = torch.where(own, (batch["tokens"] + 17) % 128, batch["tokens"])
        after = logits({**batch, "tokens": tokens}, parallel, backend)
        if not torch.equal(after[~own], before[~own]):
            wrong.append(f"document {number} changes another's logits")
        if (after[own] == before[own]).all(-1).any():
            wrong.append(f"document {number} does not change its own")
    return wrong


@pytest.mark.parametrize(
    "kind,world", mostly_slow([("p2p", 1), ("p2p", 2), ("p2p", 4), ("allgather", 2), ("a2a", 2)], [0, 1])
)
def test_a_document_changes_no_other_documents_logits_by_one_bit(ranks, tmp_path, kind, world):
    batch = packed(tmp_path, s=16).batch([0, 1, 2])
    assert int(batch["document_ids"].max()) >= 2
    for backend in ("auto", "local"):
        for wrong in ranks(world).run(influence, batch, kind, backend):
            assert wrong == []
