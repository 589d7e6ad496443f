"""A gamma that is stored minus one keeps its digits in 16 bits."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.norm import HeadsNorm, Norm


def config_of(**fields) -> TransformerConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "normalization": "RMSNorm", "params_dtype": "bf16"}
    return TransformerConfig(**sizes, layernorm_zero_centered_gamma=True, qk_layernorm=True, **fields)


@pytest.mark.parametrize("added", [False, True])
def test_small_gammas_are_not_rounded_away(added):
    """1 + 0.003 is 1 in bf16; Gemma's norms multiply by 1.003 and round then."""
    norm, x = Norm(config_of()), torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.004, 0.004, 64))
        made, h = norm(x, x) if added else (norm(x), x)
        h = 2 * x if added else x
        wide = h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + norm.eps)
        want = (wide * (1 + norm.weight.float())).bfloat16()
    assert made.dtype == torch.bfloat16 and (made == want).float().mean() > 0.98
    assert not torch.equal(made, wide.bfloat16())


def test_a_gamma_of_a_16_bit_model_has_the_gradient_of_a_wide_one():
    for make in (lambda config: Norm(config), lambda config: HeadsNorm(config, 4, Mesh.serial().tp)):
        grads = []
        for dtype in ("bf16", "fp32"):
            norm = make(config_of().replace(params_dtype=dtype))
            torch.nn.init.constant_(norm.weight, 0.003)
            x = torch.randn(6, 2, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
            x = (x if isinstance(norm, HeadsNorm) else x.flatten(2)).to(norm.weight.dtype).requires_grad_()
            y = norm(x).float()
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
            grads.append([x.grad.float(), norm.weight.grad.float()])
        for one, other in zip(*grads, strict=True):
            assert (one - other).abs().max() <= 0.02 * other.abs().max()
