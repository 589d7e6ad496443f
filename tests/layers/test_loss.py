"""Vocabulary-parallel cross entropy against torch's, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.loss import vocab_parallel_cross_entropy

S, B, V, PADDED = 5, 3, 21, 24


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(S, B, PADDED, generator=g, dtype=torch.float64)
    target = torch.randint(0, V, (S, B), generator=g)
    edges = [
        0,
        V - 1,
        *(k for n in (2, 4) for i in range(1, n) for k in (i * PADDED // n - 1, i * PADDED // n) if k < V),
    ]
    target.view(-1)[: len(edges)] = torch.tensor(edges)
    return logits, target


def parallel(rank: int, world: int, seed: int, smoothing: float, dtype: torch.dtype, fused: str = "torch"):
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    logits, target = problem(seed)
    mine = logits.chunk(world, -1)[rank].to(dtype).requires_grad_()
    with trace.record(rank) as log:
        loss = vocab_parallel_cross_entropy(mine, target, axis, vocab_size=V, label_smoothing=smoothing, kernels=fused)
        forward = log.nbytes()
        (loss * torch.arange(1, S * B + 1).view(S, B)).sum().backward()
    return loss.detach(), mine.grad, forward, log.nbytes() - forward


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("seed, fused", [(0, "torch"), (1, "torch"), (0, "emulated")])
def test_equals_dense(ranks, tp, smoothing, seed, fused):
    logits, target = problem(seed)
    logits = logits[..., :V].clone().requires_grad_()
    # torch's label smoothing takes part of the mass from the target itself; ours is Megatron's, over all words.
    eps = smoothing * V / (V - 1) if smoothing else 0.0
    log_p = F.log_softmax(logits, -1)
    want = -(1 - eps) * log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1) - eps * log_p.mean(-1)
    (want * torch.arange(1, S * B + 1).view(S, B)).sum().backward()

    results = ranks(tp).run(parallel, seed, smoothing, torch.float64, fused)
    grad = torch.cat([r[1] for r in results], -1)
    for loss, *_ in results:
        torch.testing.assert_close(loss, want.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad[..., :V], logits.grad, rtol=0, atol=1e-12)
    assert not grad[..., V:].any(), "padding gets no gradient"
    torch.testing.assert_close(grad.sum(-1), torch.zeros(S, B, dtype=torch.float64), rtol=0, atol=1e-11)


@pytest.mark.parametrize("fused", ["torch", "emulated"])
def test_only_small_messages_travel_and_none_backward(ranks, fused):
    for _, _, forward, backward in ranks(2).run(parallel, 0, 0.0, torch.float32, fused):
        assert forward == 3 * S * B * 4 and backward == 0


def test_low_precision_logits_are_computed_in_fp32(ranks):
    logits, target = problem(0)
    rounded = logits[..., :V].bfloat16().float()
    want = F.cross_entropy(rounded.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    loss, grad, *_ = ranks(2).run(parallel, 0, 0.0, torch.bfloat16)[0]
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16


def of_no_words(rank: int, world: int, fused: str) -> torch.Tensor:
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    logits, target = problem(0)
    target[0] = torch.tensor([-100, PADDED, V])
    mine = logits.chunk(world, -1)[rank].contiguous()
    return vocab_parallel_cross_entropy(mine, target, axis, vocab_size=V, kernels=fused)


@pytest.mark.parametrize("fused", ["torch", "emulated"])
def test_a_label_that_is_no_word_has_no_probability(ranks, fused):
    for loss in ranks(2).run(of_no_words, fused):
        assert (loss[0] == torch.inf).all() and loss[1:].isfinite().all()


def test_going_back_twice_gives_the_same_gradient_twice():
    """The backward pass works inside the saved tensor, but not while the graph is kept."""
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 8, (5,))
    loss = vocab_parallel_cross_entropy(logits, target, Mesh.serial().tp).sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target, reduction="sum"), logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)
