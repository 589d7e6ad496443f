"""Which ranks drop the same elements, seen in the bytes of every mask that a model draws.

A wrong stream stops nothing: tp ranks whose replicated activations drift apart train, and so do heads, tokens or
samples that all lose the same elements. So the masks themselves are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import DEFAULT, MODEL_PARALLEL, RngStreams, stream_seeds
from minimegatron.config import ParallelConfig
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.families import family_config

TP2 = {"tensor_model_parallel_size": 2}
SP = {**TP2, "sequence_parallel": True}


@contextlib.contextmanager
def recorded(masks: list[tuple[str, str]]) -> Iterator[None]:
    """Note (what was dropped, hash) of every mask, in order; torch's own attention by the generator it draws from."""
    dropout, attention, uniform = F.dropout, F.scaled_dot_product_attention, torch.Tensor.uniform_

    def note(kind: str, x: torch.Tensor) -> None:
        masks.append((kind, hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]))

    def noted_dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        kept = dropout(torch.ones_like(x), p, training)
        note("weights" if x.dim() == 4 else "hidden", kept)
        return x * kept

    def noted_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        note("weights", torch.get_rng_state())
        return attention(*args, **kwargs)

    def noted_uniform(x: torch.Tensor, *args: Any) -> torch.Tensor:
        drawn = uniform(x, *args)
        note("jitter", drawn)
        return drawn

    F.dropout, F.scaled_dot_product_attention = noted_dropout, noted_attention
    torch.Tensor.uniform_ = noted_uniform  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention
        torch.Tensor.uniform_ = uniform  # type: ignore[method-assign]


def masks_of(rank: int, world: int, layout: dict[str, Any], model: dict[str, Any]) -> dict[str, list[str]]:
    """{kind: hashes in order} of one forward and backward pass; and of what the default stream draws afterwards."""
    mesh = Mesh.build(ParallelConfig(**layout))
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 64}
    config = family_config("llama", **{**sizes, "hidden_dropout": 0.3, "attention_dropout": 0.2, **model})
    rng = RngStreams.on_mesh(7, mesh)
    module = build_model_chunks(config, mesh, 7, rng=rng).train()
    drawn: list[tuple[str, str]] = []
    with recorded(drawn):
        tokens = torch.arange(2 * 8 // mesh.cp.size).view(2, -1)
        module(tokens, labels=tokens).sum().backward()
    found: dict[str, list[str]] = {"after": [str(torch.rand(2).tolist())]}
    for kind, digest in drawn:
        found.setdefault(kind, []).append(digest)
    return found


def shared(found: list[dict[str, list[str]]], kind: str) -> set[bool]:
    """Whether the two ranks drew the same, mask by mask."""
    first, second = (rank[kind] for rank in found)
    assert len(first) == len(second) > 0
    assert len({*first}) == len(first), "every mask of a rank is another one"
    return {a == b for a, b in zip(first, second, strict=True)}


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "layout, hidden, weights",
    [
        (TP2, True, False),  # the same activations, other heads
        (SP, False, False),  # other tokens, other heads
        ({}, False, False),  # dp: other samples
        ({"context_parallel_size": 2, "cp_comm_type": "a2a"}, False, False),  # cp: other tokens, then other heads
    ],
    ids=["tp", "tp sp", "dp", "cp"],
)
def test_who_draws_the_same_masks(ranks, layout, hidden, weights, backend):
    found = ranks(2).run(masks_of, layout, {"attention_backend": backend})
    assert shared(found, "hidden") == {hidden}
    assert shared(found, "weights") == {weights}
    assert len(found[0]["hidden"]) == 5, "the embedding, and two in each layer"
    assert shared(found, "after") == {"tensor_model_parallel_size" in layout}, "the default stream goes on alike"


def test_jitter_of_a_router_is_of_a_ranks_own_tokens(ranks):
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_input_jitter_eps": 0.1, "moe_ffn_hidden_size": 16}
    found = ranks(2).run(masks_of, SP, {**experts, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    assert shared(found, "jitter") == {False}
    assert shared(found, "after") == {True}, "and comes from a stream of its own"


@pytest.mark.parametrize("modules", [None, ("core_attn",), ("mlp",)], ids=str)
def test_what_is_recomputed_draws_what_it_drew(ranks, modules):
    plain = ranks(2).run(masks_of, TP2, {"attention_backend": "reference"})
    how = {"recompute_granularity": "full"} if modules is None else {"recompute_granularity": "selective"}
    again = ranks(2).run(
        masks_of, TP2, {"attention_backend": "reference", **how, **({"recompute_modules": modules} if modules else {})}
    )
    for before, after in zip(plain, again, strict=True):
        for kind in ("hidden", "weights"):
            n = len(before[kind])
            assert after[kind][:n] == before[kind], "the forward pass is the same"
            assert set(after[kind][n:]) <= set(before[kind]), "and the backward pass draws nothing new"
        assert after["after"] == before["after"], "what comes next is not disturbed"
    repeated = sum(len(again[0][k]) - len(plain[0][k]) for k in ("hidden", "weights"))
    assert repeated == {None: 6, ("core_attn",): 2, ("mlp",): 0}[modules]


def test_seeds_of_any_two_ranks_differ_where_they_must():
    """Over 4 stages, 16 tp ranks and 2,048 ranks with other tokens."""
    places = [(t, p, d) for t in (0, 1, 7, 15) for p in range(4) for d in (0, 1, 2, 99, 100, 2047)]
    seeds = {place: stream_seeds(1234, tp_rank=place[0], pp_rank=place[1], data_rank=place[2]) for place in places}
    assert len({s[MODEL_PARALLEL] for s in seeds.values()}) == len(places)
    assert len({s[DEFAULT] for s in seeds.values()}) == len({place[1:] for place in places})
    assert not {s[DEFAULT] for s in seeds.values()} & {s[MODEL_PARALLEL] for s in seeds.values()}
