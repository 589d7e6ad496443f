"""Attention over a sequence on several ranks, against torch's SDPA over the whole sequence."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minimegatron import trace
from minimegatron.comm import ring
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import gather_tokens, local_tokens, positions, rank_spans, spans_of
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import ConfigError
from minimegatron.layers.attention import context_parallel as context
from minimegatron.layers.attention import pieces
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.models.decoder import build_model
from tests.thorough import mostly_thorough

S, B, D = 32, 2, 6
DOCS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 11 + [3] * 7, [0] * 20 + [1] * 12])
MASKS: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 5}, "full window": {"window": 5, "causal": False},
    "packed": {"document_ids": DOCS}, "packed window": {"window": 6, "document_ids": DOCS},
    "packed full": {"causal": False, "document_ids": DOCS},
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "p2p 2": (2, {"cp_comm_type": "p2p"}),
    "p2p 4": (4, {"cp_comm_type": "p2p"}),
    "allgather 2": (2, {"cp_comm_type": "allgather"}),
    "allgather 4": (4, {"cp_comm_type": "allgather"}),
    "a2a 2": (2, {"cp_comm_type": "a2a"}),
    "a2a 4": (4, {"cp_comm_type": "a2a"}),
    "a2a+p2p 2x2": (4, {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}),
    "a2a+p2p 1x4": (4, {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (1, 4)}),
}
HEADS = [(4, 2), (4, 4), (4, 1), (8, 2), (3, 1), (5, 5), (12, 3)]  # (query heads, groups)

PROGRAMS = [
    ("sdpa", torch.float64), ("local", torch.float64), ("sdpa", torch.float32), ("reference", torch.float32)
]  # fmt: skip
TWO = ("causal", "packed window")  # masks with which all of them are tried


def qkv(a: int, g: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, [S, B, heads, D]."""
    gen = torch.Generator().manual_seed(a * 100 + g)
    return [torch.randn(S, B, n, D, generator=gen, dtype=torch.float64).to(dtype) for n in (a, g, g, a)]


def oracle(q, k, v, dout, mask: AttentionMask) -> list[torch.Tensor]:
    """Output and gradients in float64 by torch's SDPA with the whole table."""
    inputs = [t.double().permute(1, 2, 0, 3).requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask.table((0, S), (0, S)), enable_gqa=True)
    out.backward(dout.double().permute(1, 2, 0, 3))
    return [t.permute(2, 0, 1, 3) for t in (out.detach(), *(t.grad for t in inputs))]


def config_of(a: int, g: int, backend: str = "sdpa", **fields: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": a, "num_query_groups": g, "kv_channels": D}
    return TransformerConfig(**sizes, attention_backend=backend, **fields)


def attend(mesh: Mesh, inputs: list[torch.Tensor], mask: AttentionMask, backend: str = "sdpa") -> list[torch.Tensor]:
    """Output and gradients of this rank's tokens."""
    a, g = inputs[0].shape[2], inputs[1].shape[2]
    q, k, v, dout = (local_tokens(t, mesh, 0).clone() for t in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = CoreAttention(config_of(a, g, backend), mesh)(*leaves, mask)
    out.backward(dout.flatten(2))
    return [out.detach().unflatten(2, (a, D)), *(t.grad for t in leaves)]


def worst(mesh: Mesh, got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Largest deviation, each tensor against its own largest element."""
    mine = [local_tokens(t, mesh, 0) for t in want]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, mine, strict=True))


def compare(rank: int, world: int, layout: dict[str, Any]) -> dict[str, float | str]:
    """Every mask and number of heads, and every backend with two masks: the deviation, or what refuses."""
    parallel = ParallelConfig(context_parallel_size=world, **layout)
    mesh, found = Mesh.build(parallel), dict[str, float | str]()
    for a, g in HEADS:
        try:
            check_model_fits(config_of(a, g), parallel, S)
        except ConfigError as error:
            found[f"{a}/{g}"] = str(error)
            continue
        every = (a, g) == HEADS[0]
        for name in MASKS if every else ("packed window",):
            mask = AttentionMask(**MASKS[name])
            for backend, dtype in PROGRAMS if every and name in TWO else PROGRAMS[: 1 + every]:
                inputs = qkv(a, g, dtype)
                deviation = worst(mesh, attend(mesh, inputs, mask, backend), oracle(*inputs, mask))
                found[f"{a}/{g} {name} {backend} {dtype}"] = deviation
    return found


@pytest.mark.parametrize(
    "name",
    mostly_thorough(
        [name for name in LAYOUTS if name != "a2a+p2p 1x4"],
        lambda name: not name.endswith(" 2"),
        ["a2a+p2p 2x2"].__contains__,  # both ways in one
    ),
)
def test_output_and_gradients_are_those_of_the_whole_sequence(ranks, name):
    world, layout = LAYOUTS[name]
    inner = {"a2a": world, "a2a+p2p": layout.get("hierarchical_context_parallel_sizes", (1,))[0]}
    dealt = inner.get(layout["cp_comm_type"], 1)
    for found in ranks(world).run(compare, layout):
        assert len(found) == 2 * len(MASKS) + 2 * 2 + len(HEADS) - 1
        for case, deviation in found.items():
            if isinstance(deviation, str):
                heads = int(case.split("/")[0])
                assert heads % dealt and f"deals a tp rank's {heads} query heads out to {dealt} ranks" in deviation
                assert "fix:" in deviation
            else:
                assert deviation <= (1e-5 if "float32" in case else 1e-10), case
        assert all((f"{a}/{g}" in found) == bool(a % dealt) for a, g in HEADS), "refused if and only if it must be"


# -------------------------------------------------------------------------------- mistakes that must be seen


def compare_with_mistake(rank: int, world: int, mistake: str) -> float:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
    inputs, mask = qkv(4, 2), AttentionMask()
    want = oracle(*inputs, mask)
    with MISTAKES[mistake]():
        return worst(mesh, attend(mesh, inputs, mask), want)


@contextlib.contextmanager
def _unweighted() -> Iterator[None]:
    def add(self, rows, out, lse):
        self.out[:, :, rows] += out
        self.lse[:, :, rows] = torch.logaddexp(self.lse[:, :, rows], lse)

    with mock.patch.object(pieces.Joined, "add", add):
        yield


@contextlib.contextmanager
def _own_lse() -> Iterator[None]:
    real = pieces._backward

    def backward(dout, q, out, lse, k, v, *how):
        out, lse = pieces._forward(q, k, v, *how)
        return real(dout, q, out, lse, k, v, *how)

    with mock.patch.object(pieces, "_backward", backward):
        yield


@contextlib.contextmanager
def _owners_reversed() -> Iterator[None]:
    def circulate(block, axis, visit):
        ring.circulate(block, axis, lambda owner, kv: visit((2 * axis.rank - owner) % axis.size, kv))

    with mock.patch.object(context, "circulate", circulate):
        yield


@contextlib.contextmanager
def _gradient_left_behind() -> Iterator[None]:
    class Forgets(ring.Shift):
        def wait(self):
            return super().wait() * 0.0

    with mock.patch.object(context, "Shift", Forgets):  # `circulate` has its own
        yield


MISTAKES = {
    "pieces added without their weights": _unweighted,
    "backward with the piece's own lse": _own_lse,
    "blocks taken for those of another rank": _owners_reversed,
    "dK and dV do not come home": _gradient_left_behind,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_classic_mistakes_are_seen(ranks, mistake):
    assert max(ranks(4).run(compare_with_mistake, mistake)) > 1e-3


# -------------------------------------------------------------------------------------------- where tokens are


def test_the_cut_is_megatrons_for_a_ring():
    """Megatron-Core 0.16.1, `get_batch_on_this_cp_rank` of 16 tokens."""
    held = lambda r, c: [i for a, b in spans_of(16, (r, c)) for i in range(a, b)]  # noqa: E731
    assert [held(r, 2) for r in range(2)] == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    four = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert [held(r, 4) for r in range(4)] == four


def test_neighbours_of_an_all_to_all_hold_consecutive_tokens():
    whole = spans_of(24, (1, 2))  # what rank 1 of a ring of 2 holds
    pieces = [spans_of(24, (1, 2), (i, 3)) for i in range(3)]
    assert [i for spans in pieces for a, b in spans for i in range(a, b)] == [i for a, b in whole for i in range(a, b)]
    assert [spans_of(24, (0, 1), (i, 3)) for i in range(3)] == [((0, 8),), ((8, 16),), ((16, 24),)]


def cut_and_gathered(rank: int, world: int, layout: dict[str, Any]) -> tuple[bool, list[int], torch.Tensor]:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world, **layout))
    x = torch.arange(2 * 16 * 3).view(2, 16, 3)
    mine = local_tokens(x, mesh, 1)
    place = positions(16, mesh)
    same = torch.equal(mine, x[:, place]) and torch.equal(gather_tokens(mine, mesh, 1), x)
    return same, [b - a for a, b in rank_spans(16, mesh)], place


@pytest.mark.parametrize("name", [n for n in LAYOUTS if "4" in n or "x" in n])
def test_gathering_undoes_the_cut(ranks, name):
    world, layout = LAYOUTS[name]
    results = ranks(world).run(cut_and_gathered, layout)
    assert all(same and sum(lengths) == 16 // world for same, lengths, _ in results)
    assert sorted(torch.cat([place for *_, place in results]).tolist()) == list(range(16))


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="multiple of 2\\*cp = 8"):
        spans_of(20, (0, 4))
    ParallelConfig(context_parallel_size=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(4, 1))
    for fields, words in (
        ({"cp_comm_type": "a2a+p2p"}, "two factors of cp"),
        ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 3)}, "two factors of cp"),
        ({"hierarchical_context_parallel_sizes": (2, 2)}, "with cp_comm_type='p2p'"),
        ({"cp_comm_type": "ring"}, "is not one of"),
    ):
        with pytest.raises(ConfigError, match=words):
            ParallelConfig(context_parallel_size=4, **fields)
    for model, kind, words in (
        ({"attention_dropout": 0.1}, "p2p", "attention_dropout=0"),
        ({"attention_dropout": 0.1}, "a2a", None),
        ({"attention_backend": "flash"}, "allgather", "FlashAttention-2"),
        ({"attention_backend": "flash"}, "a2a", None),
        ({"attention_backend": "te"}, "a2a", "Transformer Engine"),
    ):
        parallel = ParallelConfig(context_parallel_size=2, cp_comm_type=kind)
        with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
            check_model_fits(TransformerConfig(**model), parallel, 32)


# ------------------------------------------------------------------------------------- work, bytes and memory


@pytest.mark.parametrize("c", [2, 4, 8])
def test_causal_work_is_exactly_equal_on_every_rank_and_step(c):
    s, mask = 8 * c, AttentionMask()
    spans = [spans_of(s, (r, c)) for r in range(c)]
    steps = [[mask.pairs(mask.tiles(spans[r], spans[(r - i) % c])) for i in range(c)] for r in range(c)]
    assert all(sum(of_rank) == s * (s + 1) // 2 // c for of_rank in steps)
    assert all(of_rank == steps[0] for of_rank in steps), "no rank waits for another at any step"
    assert all(len(mask.tiles(spans[r], spans[j])) == 1 for r in range(c) for j in range(c)), "one kernel a step"


def pairs_computed(rank: int, world: int, kind: str) -> int:
    """Pairs of a query and a key in the rectangles that were really computed, triangles counted as such."""
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world, cp_comm_type=kind))
    counted, real = [], pieces._forward

    def spy(q, k, v, tile, *rest):
        assert tile.relation in ("full", "diagonal")
        n, m = q.shape[2], k.shape[2]
        counted.append(n * m if tile.relation == "full" else n * (n + 1) // 2)
        return real(q, k, v, tile, *rest)

    with mock.patch.object(pieces, "_forward", spy):
        attend(mesh, qkv(4, 2), AttentionMask())
    return sum(counted)


@pytest.mark.parametrize("kind", ["p2p", "allgather"])
def test_that_work_is_what_is_computed(ranks, kind):
    assert ranks(4).run(pairs_computed, kind) == [S * (S + 1) // 2 // 4] * 4


def bytes_sent(rank: int, world: int, layout: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world, **layout))
    q, k, v, dout = (local_tokens(t, mesh, 0).clone() for t in qkv(8, 2, dtype))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    sent = {}
    core = CoreAttention(config_of(8, 2), mesh)
    with trace.record(rank) as log:
        out = core(*leaves, AttentionMask())
    sent["forward"] = sum(e.wire_bytes for e in log.select(kind="comm"))
    with trace.record(rank) as log:
        out.backward(dout.flatten(2))
    sent["backward"] = sum(e.wire_bytes for e in log.select(kind="comm"))
    return sent


@pytest.mark.parametrize(
    "name, dtype",
    mostly_thorough(
        itertools.product(LAYOUTS, [torch.float32, torch.bfloat16]),
        lambda case: (case[1] == torch.bfloat16) == (case[0] in ("p2p 4", "a2a 4")),
    ),
)
def test_bytes_are_the_closed_form(ranks, name, dtype):
    world, layout = LAYOUTS[name]
    inner, outer = ParallelConfig(context_parallel_size=world, **layout).context_parallel_factors
    a, g, n, e = 8, 2, S // world, dtype.itemsize
    copied = max(g, inner)  # fewer groups than ranks: each rank gets a copy
    heads = n * B * (2 * a + 2 * copied) * D * (inner - 1) / inner * e
    keys = 2 * (outer - 1) * (n * inner) * B * (copied // inner) * D
    for sent in ranks(world).run(bytes_sent, layout, dtype):
        assert sent["forward"] == heads + keys * e
        assert sent["backward"] == heads + keys * (e + 4)  # K and V again; dK and dV in fp32


def kept_bytes(rank: int, world: int, layout: dict[str, Any]) -> int:
    """Bytes that a model's forward pass keeps for its backward pass, weights not counted."""
    parallel = ParallelConfig(context_parallel_size=world, **layout)
    sizes: dict[str, Any] = {"num_layers": 2, "vocab_size": 64, "position_embedding_type": "rope"}
    config = TransformerConfig(hidden_size=32, num_attention_heads=4, **sizes)
    mesh = Mesh.build(parallel)
    model = build_model(config, mesh, seed=0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    tokens = local_tokens(torch.arange(64)[None], mesh, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens, labels=tokens).sum()
    total = sum(kept.values())
    loss.backward()
    return total


@pytest.mark.slow
def test_activation_memory_falls_as_one_over_cp(ranks):
    whole = kept_bytes(0, 1, {})
    for name in ("p2p 2", "p2p 4", "allgather 4", "a2a 4", "a2a+p2p 2x2"):
        world, layout = LAYOUTS[name]
        for kept in ranks(world).run(kept_bytes, layout):
            assert kept <= 1.02 * whole / world, name


def rounding(rank: int, world: int) -> list[float]:
    """Root mean square errors of output, dq, dk, dv in bf16, summed over ranks."""
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
    inputs = qkv(4, 2, torch.bfloat16)
    want = oracle(*inputs, AttentionMask())
    got = attend(mesh, inputs, AttentionMask())
    return [(a.double() - local_tokens(b, mesh, 0)).square().sum().item() for a, b in zip(got, want, strict=True)]


def test_bf16_error_does_not_grow_with_the_ring(ranks):
    """Pieces are rounded to bf16 before they are joined in fp32: one rounding more than one rank has, in any number."""
    one, two, four = (torch.tensor(ranks(n).run(rounding)).sum(0).sqrt() for n in (1, 2, 4))
    assert (one > 0).all() and (two <= 1.42 * one).all() and (four <= 1.42 * one).all()
    assert (four <= 1.15 * two).all()


def events(rank: int, world: int) -> list[tuple[str, float, float]]:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
    with trace.record(rank) as log:
        attend(mesh, qkv(4, 2), AttentionMask())
    return [(e.name, e.start, e.end) for e in log.events]


def test_the_next_block_travels_while_this_one_is_computed(ranks):
    for log in ranks(4).run(events):
        steps = sorted((start, end) for name, start, end in log if name == "ring step")
        shifts = sorted((start, end) for name, start, end in log if name == "ring_shift")
        assert len(steps) == 2 * 4 and len(shifts) == 3 + 3 + 3  # forward, backward, and dK dV behind
        covered = [step for step in steps if any(a <= step[0] and step[1] <= b for a, b in shifts)]
        assert len(covered) >= 3 + 3  # all but the last of each round


def parts_of_gradients(rank: int, world: int) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """dK, dV of this rank's block in bf16; and owner -> what this rank has computed of dK, dV of its block, in fp32."""
    mesh, parts = Mesh.build(ParallelConfig(context_parallel_size=world)), list[torch.Tensor]()
    attend_backward = context.attend_backward

    def recording(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grads = attend_backward(*args)
        parts.append(torch.stack(grads).permute(0, 3, 1, 2, 4))  # [2, n, b, g, d]
        return grads

    with mock.patch.object(context, "attend_backward", recording):
        _, _, *grads = attend(mesh, qkv(4, 2, torch.bfloat16), AttentionMask(), "local")
    return grads, {(rank - step) % world: part for step, part in enumerate(parts)}


def test_gradients_of_a_block_are_rounded_once_after_their_sum(ranks):
    """A sum that is kept in bf16 while the ring turns is off by more than half of the last digit."""
    results = ranks(2).run(parts_of_gradients)
    for owner, (grads, _) in enumerate(results):
        exact = sum(parts[owner].double() for _, parts in results)
        last_digit = 2.0 ** (exact.abs().log2().floor() - 7)
        assert ((torch.stack(grads).double() - exact).abs() <= 0.51 * last_digit).all()
