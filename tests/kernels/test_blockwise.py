"""The flash algorithm against the formula in float64, its memory, and the pieces that join."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.kernels.blockwise import BLOCK, flash_attention, flash_backward, flash_forward
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.pieces import Joined, attend
from tests.thorough import mostly_thorough

SCALE = 0.3


def qkv(s: int, b=2, a=4, g=2, d=6, dtype=torch.float64, seed=0) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(b, n, s, d, generator=gen, dtype=torch.float64).to(dtype) for n in (a, g, g, a)]


def documents(b: int, s: int, seed: int = 0) -> torch.Tensor:
    return (torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.15).cumsum(1)


def oracle(q, k, v, mask: AttentionMask, dout) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients by torch's SDPA on the whole table, in float64."""
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    s = q.shape[2]
    table = mask.table((0, s), (0, s))
    out = F.scaled_dot_product_attention(*inputs, attn_mask=table, scale=SCALE, enable_gqa=True)
    out.backward(dout.double())
    keys = inputs[1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse = (inputs[0] @ keys.mT * SCALE).masked_fill(~table, -torch.inf).logsumexp(-1)
    return [t.detach() for t in (out, lse)] + [t.grad for t in inputs]


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 11},
    "window of one": {"window": 1},
    "full window": {"window": 11, "causal": False},
    "packed": {"document_ids": documents(2, 45)},
    "packed window": {"window": 7, "document_ids": documents(2, 45, 1)},
    "packed full": {"causal": False, "document_ids": documents(2, 45, 2)},
}


@pytest.mark.parametrize(
    "name, groups",
    mostly_thorough(
        itertools.product(MASKS, [4, 2, 1]), lambda case: case[1] == 2 or case in (("causal", 4), ("packed window", 1))
    ),
)
def test_every_block_size_gives_the_formula(name, groups):
    q, k, v, dout = qkv(45, g=groups)
    mask = AttentionMask(**MASKS[name])
    want = oracle(q, k, v, mask, dout)
    for block in (1, 8, 45, 128) if groups == 2 and "window" in name else (8, 45, 128):
        out, lse = flash_forward(q, k, v, mask, SCALE, block=block)
        got = [out, lse, *flash_backward(dout, q, k, v, out, lse, mask, SCALE, block=block)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "packed window"])
def test_capped_scores(name):
    q, k, v, dout = qkv(45)
    mask, cap = AttentionMask(**MASKS[name]), 0.4
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(2, 1) for t in inputs[1:])
    scores = cap * torch.tanh(inputs[0] @ keys.mT * SCALE / cap)
    want = scores.masked_fill(~mask.table((0, 45), (0, 45)), -torch.inf).softmax(-1) @ values
    want.backward(dout)
    for block in (8, 128):
        out, lse = flash_forward(q, k, v, mask, SCALE, block=block, softcap=cap)
        grads = flash_backward(dout, q, k, v, out, lse, mask, SCALE, block=block, softcap=cap)
        for a, b in zip((out, *grads), (want, *(t.grad for t in inputs)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("name", ["causal", "packed window"])
def test_other_dtypes(name, dtype, tolerance):
    q, k, v, dout = qkv(45, dtype=dtype)
    mask = AttentionMask(**MASKS[name])
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = flash_attention(*inputs, mask, SCALE, block=16)
    out.backward(dout)
    want = oracle(q, k, v, mask, dout)
    for a, b in zip([out, *(t.grad for t in inputs)], [want[0], *want[2:]], strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_scores_of_a_thousand_do_not_overflow():
    q, k, v, dout = qkv(20, dtype=torch.float32)
    q, k = 60 * q, 60 * k
    out, lse = flash_forward(q, k, v, AttentionMask(), SCALE, block=4)
    want = oracle(q, k, v, AttentionMask(), dout)
    assert lse.max() > 1000 and torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), want[0], rtol=0, atol=1e-3)


def test_a_query_that_sees_nothing():
    q, k, v, dout = qkv(4)
    out, lse = flash_forward(q, k, v, AttentionMask(), SCALE, q_start=0, k_start=2, block=2)
    assert torch.equal(out[:, :, :2], torch.zeros(2, 4, 2, 6)) and (lse[:, :, :2] == -torch.inf).all()
    dq, dk, dv = flash_backward(dout, q, k, v, out, lse, AttentionMask(), SCALE, q_start=0, k_start=2, block=2)
    assert torch.equal(dq[:, :, :2], torch.zeros(2, 4, 2, 6))
    assert all(t.isfinite().all() for t in (dq, dk, dv)) and dk[:, :, 2:].abs().max() == 0 < dk[:, :, 0].abs().min()


# ------------------------------------------------------------------------------------------------------ memory


class Peak(TorchDispatchMode):
    """The largest tensor, and the most bytes alive at once, of what is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, torch.Tensor):
                self._count(t)
        return result

    def _count(self, t: torch.Tensor) -> None:
        storage, size = t.untyped_storage(), t.untyped_storage().nbytes()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.largest, self.most = max(self.largest, t.numel()), max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_of(backend: str, s: int) -> tuple[int, int]:
    """(elements of the largest tensor, peak bytes) of a forward and backward pass."""
    config = TransformerConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=8,
        attention_backend=backend,
        kernels="torch",
    )
    q, k, v, dout = (t.permute(2, 0, 1, 3) for t in qkv(s, b=1, a=2, g=1, d=8, dtype=torch.float32))
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    core = CoreAttention(config, Mesh.serial())
    with Peak() as peak:
        core(*inputs, AttentionMask(window=None)).backward(dout.flatten(2))
    return peak.largest, peak.most


def test_no_tensor_of_s_by_s_is_ever_made():
    (largest, small), (larger, double) = peak_of("local", 512), peak_of("local", 1024)
    assert larger == largest == 2 * BLOCK * BLOCK  # one block of scores, for 2 heads, however long the sequence
    assert double < 1.9 * small  # linear in s, and a constant for the blocks
    dense, more = peak_of("reference", 512), peak_of("reference", 1024)
    assert dense[0] >= 512 * 512 and more[1] > 3.5 * dense[1], "the meter sees such tensors where they are"
    assert double < more[1] / 8


def test_what_is_kept_for_the_backward_pass():
    q, k, v, _ = qkv(64, b=1)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        flash_attention(*inputs, AttentionMask(), SCALE, block=16)
    assert kept == [(1, 4, 64, 6), (1, 2, 64, 6), (1, 2, 64, 6), (1, 4, 64, 6), (1, 4, 64)]


# ------------------------------------------------------------------------------------------------------- tiles


@st.composite
def cuts(draw) -> tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """A sequence, and two sets of spans of it."""
    s = draw(st.integers(1, 24))

    def spans() -> tuple[tuple[int, int], ...]:
        edges = sorted(draw(st.sets(st.integers(0, s), min_size=2, max_size=4)))
        return tuple(zip(edges[::2], edges[1::2], strict=False))

    return s, spans(), spans()


@settings(max_examples=60, deadline=None)
@given(cuts(), st.booleans(), st.sampled_from([None, 1, 3, 9]), st.booleans())
def test_tiles_cover_every_visible_pair_once(cut, causal, window, packed):
    s, q_spans, k_spans = cut
    mask = AttentionMask(causal, window, documents(2, s) if packed else None)
    rows, cols = (torch.cat([torch.arange(a, b) for a, b in spans]) for spans in (q_spans, k_spans))
    covered = torch.zeros(2, len(rows), len(cols), dtype=torch.int64)
    tiles = mask.tiles(q_spans, k_spans)
    for tile in tiles:
        (r0, r1), (c0, c1) = tile.rows, tile.cols
        if tile.relation == "partial":
            seen = mask.table((tile.q_start, tile.q_start + r1 - r0), (tile.k_start, tile.k_start + c1 - c0))[:, 0]
        else:
            seen = torch.ones(1, r1 - r0, c1 - c0, dtype=torch.int64)
            seen = seen.tril() if tile.relation == "diagonal" else seen
        covered[:, r0:r1, c0:c1] += seen
    table = mask.table((0, s), (0, s))[:, 0].expand(2, s, s)
    assert torch.equal(covered, table[:, rows][:, :, cols].long())
    assert mask.pairs(tiles) == int(covered[0].sum())


@pytest.mark.parametrize("backend", ["sdpa", "local", "reference"])
@pytest.mark.parametrize("pieces", [1, 2, 5, 15])
def test_pieces_join_in_any_number_and_order(pieces, backend):
    q, k, v, dout = qkv(45)
    want = oracle(q, k, v, AttentionMask(), dout)
    joined = Joined(q)
    for i in torch.randperm(pieces, generator=torch.Generator().manual_seed(0)).tolist():
        a, b = 45 * i // pieces, 45 * (i + 1) // pieces
        attend(joined, q, ((0, 45),), k[:, :, a:b], v[:, :, a:b], ((a, b),), AttentionMask(), SCALE, backend)
    torch.testing.assert_close(joined.out, want[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(joined.lse, want[1], rtol=0, atol=1e-13)


def test_bf16_does_not_grow_with_the_number_of_pieces():
    q, k, v, dout = qkv(256, dtype=torch.bfloat16)
    want = oracle(q, k, v, AttentionMask(), dout)[0]
    error = {}
    for pieces in (1, 16):
        joined = Joined(q)
        for i in range(pieces):
            a, b = 256 * i // pieces, 256 * (i + 1) // pieces
            attend(joined, q, ((0, 256),), k[:, :, a:b], v[:, :, a:b], ((a, b),), AttentionMask(), SCALE, "sdpa")
        error[pieces] = (joined.out - want).square().mean().sqrt().item()
    assert error[16] <= error[1]
