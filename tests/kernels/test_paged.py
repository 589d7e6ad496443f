"""Attention to pages where they lie is torch's in fp64: any shapes, any order of pages, anything behind the end."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from minimegatron.kernels import build, choice, operators, ops, paged
from minimegatron.kernels.paged import Scores
from tests.kernels.compare import close, random
from tests.thorough import mostly_slow

KERNELS = {"on_a_cpu": paged.on_a_cpu, "emulated": paged.by_a_kernel}


@dataclasses.dataclass
class Places:
    """Sequences in pages of `size` tokens; `kept` tokens of each were there before."""

    new: tuple[int, ...]
    kept: tuple[int, ...]
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.totals: tuple[int, ...] | None = tuple(a + b for a, b in zip(self.new, self.kept, strict=True))
        self.lengths = torch.tensor(self.totals, dtype=torch.int32)
        self.starts = torch.tensor([0, *torch.tensor(self.new).cumsum(0).tolist()], dtype=torch.int32)
        needed = [-(-total // self.size) for total in self.totals]
        self.pages = sum(needed) + 2
        order = iter(torch.randperm(self.pages, generator=generator).tolist())
        table = [[next(order) for _ in range(count)] for count in needed]
        self.page_table = torch.tensor([[*t, *[0] * (max(needed) - len(t))] for t in table], dtype=torch.int32)
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def used(self) -> torch.Tensor:
        """[pages, size], which rows of pages are tokens."""
        used = torch.zeros(self.pages, self.size, dtype=torch.bool)
        assert self.totals is not None
        for table, total in zip(self.page_table.tolist(), self.totals, strict=True):
            for j in range(total):
                used[table[j // self.size], j % self.size] = True
        return used


def case(places, groups, shared, d, dv, dtype, shape="apart", seed=0, rest=torch.nan):
    """q and pages; what is no token is `rest`. `latent`: values are a part of the keys, `mixed`: both in one tensor."""
    n, rows = sum(places.new), (places.pages, places.size)
    q = random(n, groups * shared, d, dtype=dtype, seed=seed)
    both = random(*rows, groups, d + dv, dtype=dtype, seed=seed + 1)
    both[~places.used()] = rest
    keys, values = both[..., :d], both[..., d:]
    if shape == "latent":
        values = keys[..., : min(d, dv)]
    if shape == "apart":
        keys, values = keys.contiguous(), values.transpose(1, 2).contiguous().transpose(1, 2)
    return q, keys, values


def fp64(places, q, keys, values, scores):
    """torch's, of the same numbers in fp64."""
    return paged.paged_attention(
        q.double(), keys.double(), values.double(), dataclasses.replace(places, seed=places.seed), scores
    )


SEQUENCES = st.lists(st.tuples(st.integers(1, 11), st.integers(0, 40)), min_size=1, max_size=4)


@pytest.mark.parametrize("kernel", mostly_slow(KERNELS, ["on_a_cpu"].__contains__))
@settings(max_examples=30)
@given(
    SEQUENCES,
    st.sampled_from([1, 4, 16, 20]),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3), (1, 5)]),
    st.sampled_from([(64, 64), (128, 128), (16, 16), (5, 3), (36, 24), (24, 36), (80, 64)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from(["apart", "mixed", "latent"]),
    st.sampled_from([None, 1, 5, 100]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
def test_any_shape_is_torchs(kernel, sequences, size, heads, channels, dtype, shape, window, softcap, has_sink):
    places = Places(*zip(*sequences, strict=True), size)
    tensors = case(places, *heads, *channels, dtype, shape)
    sink = random(heads[0] * heads[1], dtype=dtype, seed=9) if has_sink else None
    scores = Scores(channels[0] ** -0.5, window, softcap, sink)
    found = KERNELS[kernel](*tensors, places, scores)
    assert found.dtype == dtype
    close([found], [fp64(places, *tensors, scores)], dtype)


@pytest.mark.parametrize("shape", [(2, 8), (1, 5), (3,)])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_kept_in_their_rows(shape, heads_first, dtype):
    packed = random(4, 2, *shape, dtype=dtype)[:, 0]  # a view of packed keys and values
    pages = torch.zeros(3, 4, *shape, dtype=dtype)
    if heads_first:
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    expected, rows = pages.flatten(0, 1).clone(), torch.tensor([9, 4, 0, 11])
    expected[rows] = packed
    for kept in (paged.keep_tokens, paged.keep_on_a_cpu):
        kept(packed, pages.zero_(), rows)
        assert torch.equal(pages.flatten(0, 1), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_no_number_spreads_in_its_own_sequence(kernel):
    places = Places((1, 1, 2), (7, 7, 6), 4)
    q, keys, values = case(places, 2, 2, 16, 16, torch.float32)
    clean = KERNELS[kernel](q, keys, values, places, Scores(0.25))
    assert clean.isfinite().all()
    keys[places.page_table[1, 0], 2, 0, 3] = torch.nan
    values[places.page_table[2, 1], 1, 1, 5] = torch.inf
    found = KERNELS[kernel](q, keys, values, places, Scores(0.25))
    assert torch.equal(found[0], clean[0])
    assert found[1, :2].isnan().all() and torch.equal(found[1, 2:], clean[1, 2:]), "heads of the key's group"
    wrong = torch.zeros_like(found[2:], dtype=torch.bool)
    wrong[:, 2:, 5] = True
    assert torch.equal(~found[2:].isfinite(), wrong), "one channel of the heads of the value's group"


@pytest.mark.parametrize("new, kept", [((1,) * 3, (1500, 40, 700)), ((2,), (1500,))], ids=["sequences", "groups"])
def test_threads_share_sequences_or_groups_and_change_nothing(new, kept):
    places = Places(new, kept, 16)
    tensors = case(places, 4, 4, 64, 64, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(paged.on_a_cpu(*tensors, places, Scores(0.125)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    close(found[:1], [fp64(places, *tensors, Scores(0.125))], torch.float32)


def test_ranges_of_keys_are_joined_whatever_thread_is_first():
    """Four blocks share the keys of the one token; those of the short sequence have none, and latents are wide."""
    library = operators.library("paged_attention", "emulated")
    for places, channels in ((Places((1,), (300,), 16), (64, 64)), (Places((1, 1), (3, 200), 8), (576, 512))):
        tensors, found = case(places, 1, 5, *channels, torch.float32, "latent"), []
        for order in (0, 1, 7):
            library.order(order)
            try:
                found.append(paged.by_a_kernel(*tensors, places, Scores(0.125)))
            finally:
                library.order(0)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        close(found[:1], [fp64(places, *tensors, Scores(0.125))], torch.float32)


def test_no_compiler_leaves_torch_computing(monkeypatch):
    places = Places((1, 3), (5, 9), 4)
    tensors = case(places, 2, 2, 16, 16, torch.float32)
    cached = (choice._obstacle_on_a_cpu,)
    monkeypatch.setattr(build, "compiler", lambda target: None)
    for function in cached:
        function.cache_clear()
    try:
        with warnings.catch_warnings(), torch.inference_mode():  # `doctor` says it
            warnings.simplefilter("error")
            found = ops.paged_attention(*tensors, places, 0.25)
    finally:
        for function in cached:
            function.cache_clear()
    assert torch.equal(found, paged.paged_attention(*tensors, places, Scores(0.25)))


def package(q, key_pages, value_pages, *, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap):
    """What flash-attn 2 says of `flash_attn_with_kvcache`, by the formula."""
    assert q.dim() == 4 and key_pages.shape[1] % 256 == 0 and causal
    assert cache_seqlens.dtype == block_table.dtype == torch.int32 and block_table.is_contiguous()
    out = torch.zeros_like(q)
    for i, length in enumerate(cache_seqlens.tolist()):
        k, v = (t[block_table[i].long()].flatten(0, 1)[:length] for t in (key_pages, value_pages))
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("ad,mad->am", q[i, 0], k) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if window_size[0] >= 0:
            scores[:, : max(0, length - 1 - window_size[0])] = -torch.inf
        out[i, 0] = torch.einsum("am,mad->ad", scores.softmax(-1), v)
    return out


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0)])
def test_flash_attn_is_told_what_is_meant(window, softcap, monkeypatch):
    """A stub with its signature, on a CPU: the package itself runs on GPUs alone."""
    monkeypatch.setattr(paged, "_flash_attn", lambda: package)
    places = Places((1, 1, 1), (3, 255, 300), 256)
    tensors = case(places, 2, 2, 16, 16, torch.float32, rest=0.0)
    scores = Scores(0.25, window, softcap)
    found = paged.by_flash_attn(*tensors, places, scores)
    close([found], [fp64(places, *tensors, scores)], torch.float32)


def test_flash_attn_is_asked_only_where_it_can(monkeypatch):
    def fits(new=(1, 1), page=256, dtype=torch.bfloat16, device="cuda", d=64, dv=64):
        with FakeTensorMode():
            q = torch.empty(sum(new), 4, d, dtype=dtype, device=device)
            keys, values = (torch.empty(3, page, 2, x, dtype=dtype, device=device) for x in (d, dv))
        return paged.fits_flash_attn(q, keys, values, SimpleNamespace(new=new))

    monkeypatch.setattr(paged, "_flash_attn", lambda: package)
    assert fits() and fits(page=512)
    assert not any(
        (
            fits(new=(1, 2)),
            fits(page=16),
            fits(dtype=torch.float32),
            fits(device="cpu"),
            fits(d=512, dv=512),
            fits(dv=32),
        )
    )
    monkeypatch.setattr(paged, "_flash_attn", lambda: None)
    assert not fits()
