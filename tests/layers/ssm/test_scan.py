"""The chunked scan is the recurrence, step by step, in fp64: values, states and gradients."""

from __future__ import annotations

import pytest
import torch

from minimegatron.layers.ssm import scan
from minimegatron.layers.ssm.convolution import segments_of
from minimegatron.layers.ssm.scan import Scan, carry, step

S, GROUPS, HEADS, P, N = 13, 2, 6, 3, 5


def inputs(b: int = 2, s: int = S) -> dict[str, torch.Tensor]:
    """x, dt, g, B, C in fp64, of which g leaves nothing of a state after some hundred steps or much of it."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {"x": normal(s, b, HEADS, P), "dt": normal(s, b, HEADS).exp() / 4}
    made |= {"g": -normal(HEADS).exp() * made["dt"]}
    made |= {"B": normal(s, b, GROUPS, N), "C": normal(s, b, GROUPS, N)}
    return {name: t.requires_grad_() for name, t in made.items()}


def step_by_step(x, dt, g, B, C, state=None, document_ids=None):
    """The recurrence as it is written: y [s, b, heads, p], and h after the last token."""
    h = torch.zeros(*x.shape[1:], N, dtype=x.dtype) if state is None else state
    B, C = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (B, C))
    ys = []
    for i in range(len(x)):
        if document_ids is not None and i:
            goes_on = document_ids[:, i] == document_ids[:, i - 1]
            h = h * goes_on[:, None, None, None]
        h = g[i].exp()[..., None, None] * h + (dt[i, ..., None] * x[i])[..., None] * B[i, :, :, None]
        ys.append((h @ C[i, ..., None])[..., 0])
    return torch.stack(ys), h


def gradients(of: dict[str, torch.Tensor], *outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss in which every number of the outputs has another weight."""
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outputs)
    return dict(zip(of, torch.autograd.grad(loss, list(of.values())), strict=True))


DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, S, 100])
def test_chunks_are_the_recurrence(chunk_size, documents, monkeypatch):
    monkeypatch.setattr(scan, "BLOCK", 3)  # chunks of 1 make five blocks
    of = inputs()
    state = torch.randn(
        2, HEADS, P, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).requires_grad_()
    segments = None
    if documents is not None:  # the state belongs to the token before, which is of the first document
        segments = segments_of(documents, 1)
        segments[:, 0] = segments[:, 1]
    y, after = Scan(*of.values(), chunk_size, segments).outputs(state)
    want, last = step_by_step(*of.values(), state, documents)
    assert (y - want).abs().max() <= 1e-12 and (after - last).abs().max() <= 1e-12
    of["state"] = state
    got, wanted = (gradients(of, *both) for both in ((y, after), (want, last)))
    for name in of:
        assert (got[name] - wanted[name]).abs().max() <= 1e-11 * wanted[name].abs().max(), name


def test_a_sequence_in_two_pieces_is_the_whole():
    """By the state after the first, and by what both make of a state of zeros."""
    of = inputs()
    want, last = step_by_step(**of)
    pieces = [Scan(*(t[a:b] for t in of.values()), 4) for a, b in ((0, 6), (6, S))]
    first, between = pieces[0].outputs()
    second, after = pieces[1].outputs(between)
    assert (torch.cat([first, second]) - want).abs().max() <= 1e-12 and (after - last).abs().max() <= 1e-12
    before, end = carry(torch.zeros_like(between), *zip(*(piece.summary() for piece in pieces), strict=True))
    assert (before[1] - between).abs().max() <= 1e-12 and (end - last).abs().max() <= 1e-12


def test_a_step_is_a_piece_of_one_token():
    of = inputs()
    state, ys = torch.zeros(2, HEADS, P, N, dtype=torch.float64), []
    for i in range(S):
        y, state = step(*(t[i] for t in of.values()), state)
        ys.append(y)
    want, last = step_by_step(**of)
    assert (torch.stack(ys) - want).abs().max() <= 1e-12 and (state - last).abs().max() <= 1e-12


def test_large_decays_overflow_nowhere():
    """In fp32, where exp of the sum over a chunk would."""
    of = {name: t.detach().float() for name, t in inputs(s=64).items()}
    of["g"] = of["g"] * 200
    for name in of:
        of[name].requires_grad_()
    y, after = Scan(*of.values(), 64).outputs()
    grads = gradients(of, y, after)
    assert all(g.isfinite().all() for g in grads.values())
    want, _ = step_by_step(*(t.detach().double() for t in of.values()))
    assert (y - want).abs().max() <= 1e-4 * want.abs().max()
