"""The chunked delta rule is the recurrence, step by step, in fp64; what transformers computes: `tests/models`."""

from __future__ import annotations

import pytest
import torch

from minimegatron.layers.ssm.convolution import segments_of
from minimegatron.layers.ssm.delta_rule import DeltaRule, step
from minimegatron.layers.ssm.scan import carry
from tests.layers.ssm.test_scan import DOCUMENTS, gradients

S, GROUPS, HEADS, K, V = 13, 2, 6, 5, 3


def inputs(b: int = 2, s: int = S) -> dict[str, torch.Tensor]:
    """q, k, v, g and beta in fp64: decays of which some leave much of a state, and steps between 0 and 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {"q": normal(s, b, GROUPS, K), "k": normal(s, b, GROUPS, K), "v": normal(s, b, HEADS, V)}
    made |= {"g": -normal(s, b, HEADS).exp() / 4, "beta": normal(s, b, HEADS).sigmoid()}
    return {name: t.requires_grad_() for name, t in made.items()}


def a_state(b: int = 2) -> torch.Tensor:
    return torch.randn(b, HEADS, K, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()


def step_by_step(q, k, v, g, beta, state=None, document_ids=None):
    """The rule as one line: S = exp(g) (I - beta k k^T) S + beta k v^T; o [s, b, heads, v], and the last S."""
    S = torch.zeros(*v.shape[1:3], K, V, dtype=v.dtype) if state is None else state
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(HEADS // GROUPS, 2)[..., None] for t in (q, k))
    found = []
    for i in range(len(q)):
        if document_ids is not None and i:
            S = S * (document_ids[:, i] == document_ids[:, i - 1])[:, None, None, None]
        forgets = torch.eye(K, dtype=v.dtype) - beta[i, ..., None, None] * k[i] @ k[i].mT
        S = g[i].exp()[..., None, None] * forgets @ S + beta[i, ..., None, None] * k[i] @ v[i][:, :, None]
        found.append((S.mT @ q[i])[..., 0] / K**0.5)
    return torch.stack(found), S


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, S, 100])
def test_chunks_are_the_recurrence(chunk_size, documents):
    of, state, segments = inputs(), a_state(), None
    if documents is not None:  # the state belongs to the token before, which is of the first document
        segments = segments_of(documents, 1)
        segments[:, 0] = segments[:, 1]
    o, after = DeltaRule(*of.values(), chunk_size, segments).outputs(state)
    want, last = step_by_step(*of.values(), state, documents)
    assert (o - want).abs().max() <= 1e-12 and (after - last).abs().max() <= 1e-12
    of["state"] = state
    got, wanted = (gradients(of, *both) for both in ((o, after), (want, last)))
    for name in of:
        assert (got[name] - wanted[name]).abs().max() <= 1e-11 * wanted[name].abs().max(), name


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_a_sequence_in_three_pieces_is_the_whole(documents):
    """By what each piece makes of a state: a matrix times it, and what it adds."""
    of, state = inputs(), a_state()
    segments = None if documents is None else segments_of(documents, 1)
    if segments is not None:
        segments[:, 0] = segments[:, 1]
    want, last = step_by_step(*of.values(), state, documents)
    spans = ((0, 2), (2, 8), (8, S))
    pieces = [
        DeltaRule(*(t[a:b] for t in of.values()), 4, None if segments is None else segments[:, a : b + 1])
        for a, b in spans
    ]
    before, after = carry(state, *zip(*(piece.summary() for piece in pieces), strict=True))
    got = torch.cat([piece.outputs(at)[0] for piece, at in zip(pieces, before, strict=True)])
    assert (got - want).abs().max() <= 1e-12 and (after - last).abs().max() <= 1e-12
    of["state"] = state
    found, wanted = (gradients(of, *both) for both in ((got, after), (want, last)))
    assert all((found[n] - wanted[n]).abs().max() <= 1e-11 * wanted[n].abs().max() for n in of)


def test_a_step_is_a_piece_of_one_token():
    of, state, found = inputs(), torch.zeros(2, HEADS, K, V, dtype=torch.float64), []
    for i in range(S):
        o, state = step(*(t[i] for t in of.values()), state)
        found.append(o)
    want, last = step_by_step(*of.values())
    assert (torch.stack(found) - want).abs().max() <= 1e-12 and (state - last).abs().max() <= 1e-12


def test_what_is_stored_last_is_what_is_read():
    """Steps of 1 without decay: the state says of a key exactly the value that came with it last."""
    key = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64).expand(2, 1, 1, 3)
    v = torch.tensor([[5.0, 6.0], [-7.0, 8.0]], dtype=torch.float64).view(2, 1, 1, 2)
    o, _ = DeltaRule(key, key, v, torch.zeros(2, 1, 1), torch.ones(2, 1, 1), 64).outputs()
    assert (o * 3**0.5 - v).abs().max() <= 1e-6


def test_large_decays_overflow_nowhere():
    """In fp32, where exp of the sum over a chunk would."""
    of = {name: t.detach().float() for name, t in inputs(s=64).items()}
    of["g"] = of["g"] * 200
    of = {name: t.requires_grad_() for name, t in of.items()}
    o, after = DeltaRule(*of.values(), 64).outputs()
    assert all(grad.isfinite().all() for grad in gradients(of, o, after).values())
    want, _ = step_by_step(*(t.detach().double() for t in of.values()))
    assert (o - want).abs().max() <= 1e-4 * want.abs().max()
