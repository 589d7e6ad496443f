"""torch.compile takes every operator as one node of one graph, forward and backward."""

from __future__ import annotations

import torch

from minimegatron.kernels import activation, cross_entropy, flash, norm, permute, rope, softmax
from tests.kernels.compare import random


def block(x, r, gamma, w, cos, sin, slots, places, target):
    """A little of everything, in the order of a layer."""
    y, h = norm.add_norm(x, r, gamma, None, 1e-5)
    heads = rope.rope(y.view(6, 2, 2, 16), cos, sin)
    q = heads.permute(1, 2, 0, 3)
    z, _ = flash.flash_attention(q, q, q, 0.25)
    z = z + softmax.scaled_softmax(q @ q.transpose(-1, -2), 0.25, None, True) @ q
    z = activation.swiglu(activation.bias_gelu(z.permute(2, 0, 1, 3).reshape(12, 32) @ w, w[0], True))
    z = norm.norm(h.view(12, 32), gamma, gamma, 1e-5) + z
    z = permute.unpermute(permute.permute(z, slots, places), slots, places)
    return cross_entropy.cross_entropy(z, target)


def test_one_graph_without_breaks_and_the_same_numbers():
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    rest = (random(6, 1, 1, 8), random(6, 1, 1, 8, seed=1), slots, permute.inverse(slots, 12, 2), torch.arange(12))
    inputs = [random(6, 2, 32, seed=2), random(6, 2, 32, seed=3), random(32, seed=4), random(32, 64, seed=5, scale=0.2)]
    graphs = []

    def backend(graph, examples):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend=backend)):
        given = [t.clone().requires_grad_() for t in inputs]
        loss = run(*given, *rest)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    (seen,) = graphs
    mine = {name for name in seen if "minimegatron" in name}
    assert len(mine) >= 9, sorted(seen)
