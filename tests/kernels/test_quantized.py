"""Products with packed weights are those with their numbers, for any shape, group and cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.kernels import ops
from minimegatron.kernels.quantized import BLOCK, FEW, Packed, Scheme, dequantize, quantize
from tests.kernels.compare import close, random


def matrix(rows, columns, scheme, stored, first=0, seed=0):
    """(packed, its numbers) of columns `first` and on of a matrix whose row has `columns` more."""
    weight = random(rows, first + columns, seed=seed)
    q, scale = quantize(weight, scheme, stored)
    whole = dequantize(q, scale, scheme)
    scale = scale[:, 0 if scheme.group_size is None else first // scheme.group_size :]
    return Packed(q[:, first:].contiguous(), scale, scheme, torch.float32, first), whole[:, first:].float()


@settings(max_examples=80)
@given(
    st.sampled_from([1, 2, 3, 7, FEW, FEW + 1]),
    st.sampled_from([1, 5, 16, 37]),
    st.sampled_from([1, 7, 8, 33, 128, 200, 515]),
    st.sampled_from([4, 8]),
    st.sampled_from([None, 8, 24, 128]),
    st.sampled_from([0, 1, 12, 130]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_a_product_is_that_with_its_numbers(n, rows, columns, bits, group, first, stored, biased):
    packed, numbers = matrix(rows, columns, Scheme("int", bits, group), stored, first)
    x, bias = random(2, n, columns, seed=1)[1:], random(rows, seed=2) if biased else None
    with torch.no_grad():  # by torch
        assert torch.equal(packed.numbers(), numbers)
        close([ops.linear(x, packed, bias)], [F.linear(x, numbers, bias)], torch.float32)
    with torch.inference_mode():  # by the kernel
        wanted = F.linear(x.double(), numbers.double(), None if bias is None else bias.double())
        close([ops.linear(x, packed, bias)], [wanted], torch.float32, 3.0)


def test_many_rows_take_the_matrix_in_blocks():
    packed, numbers = matrix(BLOCK + 9, 64, Scheme("int", 4, 32), torch.float32)
    x = random(FEW + 5, 64, seed=1)
    with torch.inference_mode():
        close([ops.linear(x, packed)], [F.linear(x, numbers)], torch.float32)


@pytest.mark.parametrize(("bits", "share"), [(4, 4.25), (8, 8.25)])
def test_the_memory_is_that_of_words_and_scales(bits, share):
    packed, _ = matrix(64, 1024, Scheme("int", bits, 128), torch.float32)
    assert packed.nbytes * 8 == 64 * 1024 * share


def test_threads_share_rows_and_change_nothing():
    packed, _ = matrix(700, 1024, Scheme("int", 4, 128), torch.float32)
    x, found, threads = random(8, 1024, seed=1), [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with torch.inference_mode():
                found.append(ops.linear(x, packed))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
