"""A sink is one more key whose value is 0: by the formula in float64, in pieces, and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import local_tokens
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.param import layout_of
from minimegatron.optim.groups import rates_of
from tests.layers.attention.test_context_parallel import LAYOUTS, MASKS, S, config_of, qkv
from tests.thorough import mostly_thorough

A, G = 4, 2
SINKS = torch.tensor([0.3, -2.0, 1.5, 4.0], dtype=torch.float64)


def oracle(mask: AttentionMask) -> list[torch.Tensor]:
    """Output, dq, dk, dv and the gradient of the sinks, by torch's attention with a key of zeros more."""
    q, k, v, dout = qkv(A, G)
    leaves = [t.permute(1, 2, 0, 3).clone().requires_grad_() for t in (q, k, v)]
    sinks = SINKS.clone().requires_grad_()
    hidden = ~mask.table((0, S), (0, S))
    bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    bias = torch.cat([bias.expand(-1, A, -1, -1), sinks[:, None, None].expand(len(bias), A, S, 1)], -1)
    k, v = (F.pad(t, (0, 0, 0, 1)) for t in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], k, v, attn_mask=bias, enable_gqa=True)
    out.backward(dout.permute(1, 2, 0, 3))
    grads = [t.grad for t in (*leaves, sinks)]
    return [*(t.permute(2, 0, 1, 3) for t in (out.detach(), *grads[:3])), grads[3]]


def attended(mesh: Mesh, mask: AttentionMask, backend: str) -> list[torch.Tensor]:
    """The same of this rank's tokens; the gradient of the sinks is summed over cp, as a step does it."""
    q, k, v, dout = (local_tokens(t, mesh, 0).clone() for t in qkv(A, G))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    core = CoreAttention(config_of(A, G, backend, softmax_type="learnable"), mesh).double()
    with torch.no_grad():
        core.softmax_offset.copy_(SINKS)
    out = core(*leaves, mask)
    out.backward(dout.flatten(2))
    return [
        out.detach().unflatten(2, (A, -1)),
        *(t.grad for t in leaves),
        all_reduce(core.softmax_offset.grad, mesh.cp),
    ]


def worst(mesh: Mesh, mask: AttentionMask, backend: str) -> float:
    want, got = oracle(mask), attended(mesh, mask, backend)
    want = [*(local_tokens(t, mesh, 0) for t in want[:4]), want[4]]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_output_and_gradients_are_the_formula(name):
    for backend in ("reference", "sdpa", "local", "auto"):
        assert worst(Mesh.serial(), AttentionMask(**MASKS[name]), backend) <= 1e-12, backend


def over_ranks(rank: int, world: int, layout: dict[str, Any]) -> list[float]:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world, **layout))
    return [worst(mesh, AttentionMask(**MASKS[name]), "auto") for name in ("causal", "packed window")]


@pytest.mark.parametrize(
    "name", mostly_thorough([name for name in LAYOUTS if name != "a2a+p2p 1x4"], lambda name: not name.endswith(" 4"))
)
def test_it_is_added_once_on_any_number_of_ranks(ranks, name):
    world, layout = LAYOUTS[name]
    for found in ranks(world).run(over_ranks, layout):
        assert max(found) <= 1e-12


def test_off_by_one_is_a_sink_of_zero_that_nobody_learns():
    inputs = [t.float() for t in qkv(A, G)[:3]]
    one = CoreAttention(config_of(A, G, softmax_type="off-by-one"), Mesh.serial())
    learned = CoreAttention(config_of(A, G, softmax_type="learnable"), Mesh.serial())
    torch.nn.init.zeros_(learned.softmax_offset)
    assert torch.equal(one(*inputs), learned(*inputs)) and not list(one.parameters()) and not one.state_dict()


def test_weights_are_dropped_beside_a_sink_that_stays():
    """By the formula alone: what is dropped is divided by the sum with the sink."""
    config = config_of(A, G, "auto", softmax_type="learnable", attention_dropout=0.5)
    core = CoreAttention(config, Mesh.serial())
    torch.nn.init.constant_(core.softmax_offset, 1.0)
    q, k, v = (t.float() for t in qkv(A, G)[:3])
    torch.manual_seed(0)
    some = torch.stack([core(q, k, torch.ones_like(v)) for _ in range(400)]).mean(0)
    torch.testing.assert_close(some, core.eval()(q, k, torch.ones_like(v)), atol=0.2, rtol=0.0)


def test_a_sink_does_not_decay():
    core = CoreAttention(config_of(A, G, softmax_type="learnable"), Mesh.serial())
    rates = rates_of("core_attention.softmax_offset", layout_of(core.softmax_offset), OptimizerConfig())
    assert rates.wd_mult == 0.0


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"attention_backend": "flash"}, "softmax_type learnable with attention_backend flash"),
        ({"attention_backend": "sdpa", "attention_dropout": 0.1}, "only the formula drops weights beside a sink"),
        ({"multi_latent_attention": True, "position_embedding_type": "rope", "add_bias_linear": False}, "no sinks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words) as error:
        TransformerConfig(softmax_type="learnable", **fields)
    assert error.value.fix
