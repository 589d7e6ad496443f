"""Permutation of rows: against the reference in fp64, with padding and dropped tokens."""

from __future__ import annotations

import pytest
import torch

from minimegatron.kernels import permute, reference
from tests.kernels.compare import DTYPES, both, close, misaligned, random

T, K = 7, 3


def maps(drop=3, padding=2):
    """slots and places of 7 tokens with 3 choices: a random order, some dropped, some rows of padding."""
    order = torch.randperm(T * K, generator=torch.Generator().manual_seed(0))[: T * K - drop]
    slots = torch.cat([order[:5], torch.full((padding,), -1), order[5:]])
    return slots, permute.inverse(slots, T, K)


def test_the_inverse():
    slots, places = maps()
    for row, slot in enumerate(slots.tolist()):
        assert slot < 0 or places.view(-1)[slot] == row
    assert (places == -1).sum() == 3


@pytest.mark.parametrize("h", [1, 31, 32, 33, 1023, 4097])
def test_permute_and_unpermute(h):
    slots, places = maps()
    for dtype in DTYPES if h == 33 else (torch.float64, torch.bfloat16):
        x, y = random(T, h, dtype=dtype), random(len(slots), h, dtype=dtype, seed=1)
        probs = random(T, K, seed=2, dtype=torch.promote_types(dtype, torch.float32))
        compare = [
            (lambda m: lambda rows: m.permute(rows, slots, places), [x]),
            (lambda m: lambda rows, w: m.unpermute(rows, slots, places, w), [y, probs]),
            (lambda m: lambda rows: m.unpermute(rows, slots, places), [y]),
        ]
        for function, tensors in compare:
            close(*both(function(permute), function(reference), tensors), dtype)


def test_there_and_back_is_k_times_the_token():
    slots, places = maps(drop=0)
    x = random(T, 16)
    assert torch.allclose(permute.unpermute(permute.permute(x, slots, places), slots, places), K * x)


def test_strides_misaligned_memory_and_empty():
    slots, places = maps()
    x = random(T, 64)
    for view in (x[:, ::2], misaligned(x)):
        assert torch.equal(permute.permute(view, slots, places), reference.permute(view, slots, places))
    none = torch.empty(0, dtype=torch.int64)
    assert permute.permute(torch.empty(0, 8), none, none.view(0, 2)).shape == (0, 8)
    assert torch.equal(permute.unpermute(torch.empty(0, 8), none, torch.full((3, 2), -1)), torch.zeros(3, 8))


def test_rows_beyond_two_gigabytes_and_two_billion_elements():
    """Memory that is not touched is not used: the rows in between cost nothing."""
    h, far = 4096, 2**31 // 4096 + 3
    x = torch.empty(far + 1, h, dtype=torch.bfloat16)
    x[0], x[far] = random(h), random(h, seed=1)
    slots = torch.tensor([2 * far, 0])
    out = torch.ops.minimegatron.permute(x, slots, torch.zeros(far + 1, 2, dtype=torch.int64))
    assert torch.equal(out, torch.stack([x[far], x[0]]))
    both_ways = permute.unpermute(x, torch.zeros(far + 1, dtype=torch.int64), torch.tensor([[far, 0]]))
    assert torch.equal(both_ways[0], (x[far].float() + x[0].float()).bfloat16())
