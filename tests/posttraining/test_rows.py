"""Rows hold each label once, whatever is packed; what does not fit is counted."""

from __future__ import annotations

import collections

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.errors import DataError
from minimegatron.posttraining.conversations import Tokens
from minimegatron.posttraining.rows import Items, RowDataset, fit
from minimegatron.posttraining.sequences import sequence_sums

S = 12
LENGTHS = st.lists(st.lists(st.integers(2, 9), min_size=2, max_size=2), min_size=1, max_size=9)


def tokens_of(lengths: list[list[int]]) -> list[list[Tokens]]:
    """Items whose ids are all different; the second half of each sequence counts."""
    ids = iter(range(10_000))

    def one(n: int) -> Tokens:
        return Tokens(tuple(next(ids) for _ in range(n)), tuple(i >= n // 2 for i in range(n)))

    return [[one(n) for n in item] for item in lengths]


@hypothesis.given(lengths=LENGTHS, packs=st.booleans(), seed=st.integers(0, 5))
def test_an_epoch_has_every_label_once(lengths: list[list[int]], packs: bool, seed: int) -> None:
    given = tokens_of(lengths)
    rows = RowDataset(Items.of(given, S), S, 1, seed, packs)
    batch = rows.batch(range(len(rows)))
    kept = [fit(item, S) for item in given]
    every = [one for item in kept for one in item]
    pairs = collections.Counter(pair for one in every for pair in zip(one.ids, one.ids[1:], strict=False))
    counts = {b for one in every for b, c in zip(one.ids[1:], one.counts[1:], strict=True) if c}
    found: collections.Counter = collections.Counter()
    for row in range(len(rows)):
        of_row = {name: tensor[row].tolist() for name, tensor in batch.items()}
        n = sum(stop - first - 1 for first, stop in rows.spans(rows.row(row)))
        found.update(zip(of_row["tokens"][:n], of_row["labels"][:n], strict=True))
        assert [label in counts for label in of_row["labels"][:n]] == [m == 1 for m in of_row["loss_mask"][:n]]
        assert not any(of_row["loss_mask"][n:])
        starts = [i for i in range(n) if of_row["position_ids"][i] == 0]
        assert [of_row["document_ids"][i] for i in starts] == list(range(len(starts)))  # a sequence, a document
        assert len(starts) % 2 == 0 and len(starts) <= rows.most_sequences
    assert found == pairs


@hypothesis.given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), s=st.integers(2, 40))
def test_the_longest_sequences_lose_their_end(lengths: list[int], s: int) -> None:
    item = [Tokens(tuple(range(n)), (True,) * n) for n in lengths]
    pairs = [len(one.ids) - 1 for one in fit(item, s)]
    before = [n - 1 for n in lengths]
    assert sum(pairs) <= s and (pairs == before) == (sum(before) <= s)
    cut = [p for p, b in zip(pairs, before, strict=True) if p < b]
    assert all(p <= min(cut, default=p) for p, b in zip(pairs, before, strict=True) if p == b)
    assert not cut or s - sum(pairs) < len(cut)  # no room is left that a cut one could use


def test_what_is_cut_and_left_out_is_counted() -> None:
    late = Tokens(tuple(range(20)), (False,) * 15 + (True,) * 5)
    items = Items.of([[late], [Tokens((1, 2, 3), (False, True, True))], [Tokens(tuple(range(14)), (True,) * 14)]], S)
    assert (len(items), items.cut, items.left_out) == (2, 2, 1)
    with pytest.raises(DataError, match="none of 1 examples"):
        Items.of([[late]], S)


def test_epochs_have_all_rows_in_other_orders_and_numbers_come_back() -> None:
    rows = RowDataset(Items.of(tokens_of([[4, 5]] * 6), S), S, 12, packs=False)
    orders = [[rows.row(k) for k in range(first, first + 6)] for first in (0, 6)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(6)) and orders[0] != orders[1]
    rows.extra["numbers"] = np.zeros(len(rows.items.ids), dtype=np.float32)
    values = rows.batch_of_rows(range(6))["labels"].float()
    rows.keep("numbers", values.numpy())
    batch = rows.batch(range(12))
    mask = batch["loss_mask"] > 0
    assert torch.equal(batch["numbers"][mask], batch["labels"][mask].float())


@hypothesis.given(st.integers(1, 4), st.integers(0, 100))
def test_sums_are_those_of_each_sequence(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, n + 2, (3, 20), generator=generator).sort(1).values
    values = torch.rand(3, 20, generator=generator, dtype=torch.float64, requires_grad=True)
    sums = sequence_sums(values, ids, n, Mesh.serial())
    want = torch.stack([(values * (ids == k)).sum(1) for k in range(n)], 1)
    assert torch.allclose(sums, want)
    weights = torch.rand(3, n, generator=generator, dtype=torch.float64)
    (grad,) = torch.autograd.grad((sums * weights).sum(), values)
    assert torch.allclose(grad, torch.autograd.grad((want * weights).sum(), values)[0])
