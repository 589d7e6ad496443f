"""Which attention is chosen, and what each package and torch's own variable-length function is asked for."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.attention import choice as attention_choice
from minimegatron.layers.attention import mask
from minimegatron.layers.attention.choice import Machine, Task, choose_backend, fastest, groups_share
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from tests.kernels.test_blockwise import MASKS, qkv
from tests.thorough import mostly_slow

BOTH = frozenset({"flash", "varlen"})
BF16 = Task(torch.bfloat16, 128, 128)
PACKED = Task(torch.bfloat16, 128, 128, rule=True)
OLD, AMPERE, HOPPER, BLACKWELL = (7, 5), (8, 0), (9, 0), (12, 0)


def model(**fields: Any) -> TransformerConfig:
    base: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6}
    return TransformerConfig(**{**base, "params_dtype": "bf16", **fields})


def gpu_mesh() -> Mesh:
    return Mesh.serial(device="cuda")


@pytest.mark.parametrize("capability,task,both,torch_only", [
    (None, BF16, "sdpa", "sdpa"),
    (None, PACKED, "sdpa", "sdpa"),
    (OLD, BF16, "sdpa", "sdpa"),
    (OLD, PACKED, "sdpa", "sdpa"),
    (AMPERE, BF16, "flash", "sdpa"),
    ((8, 9), BF16, "flash", "sdpa"),
    (AMPERE, PACKED, "flash", "varlen"),
    (HOPPER, BF16, "sdpa", "sdpa"),
    (HOPPER, PACKED, "flash", "varlen"),
    (BLACKWELL, BF16, "sdpa", "sdpa"),
    (BLACKWELL, PACKED, "flash", "varlen"),
    (HOPPER, Task(torch.float16, 128, 128, rule=True), "flash", "varlen"),
    (HOPPER, Task(torch.float32, 128, 128, rule=True), "sdpa", "sdpa"),
    (AMPERE, Task(torch.float32, 128, 128), "sdpa", "sdpa"),
    (HOPPER, Task(torch.bfloat16, 128, 128, rule=True, dropout=True), "flash", "sdpa"),
    (HOPPER, Task(torch.bfloat16, 100, 100, rule=True), "flash", "sdpa"),  # no multiple of 8
    (HOPPER, Task(torch.bfloat16, 288, 288, rule=True), "sdpa", "sdpa"),  # wider than FlashAttention-2 takes
    (AMPERE, Task(torch.bfloat16, 192, 128), "sdpa", "sdpa"),  # latent attention: zeros to fill up cost more
    (HOPPER, Task(torch.bfloat16, 192, 128, rule=True), "flash", "varlen"),  # ... than a table of s x s does not
])  # fmt: skip
def test_the_table(capability, task, both, torch_only):
    assert fastest(Machine(capability, BOTH), task) == both
    assert fastest(Machine(capability, frozenset({"varlen"})), task) == torch_only
    assert fastest(Machine(capability), task) == "sdpa"


def test_grouped_heads_are_copied_where_torch_would_store_the_matrix():
    fp32 = Task(torch.float32, 128, 128)
    assert groups_share(Machine(None), fp32) and groups_share(Machine(HOPPER), BF16)
    assert not groups_share(Machine(HOPPER), fp32) and not groups_share(Machine(HOPPER), PACKED)
    assert not groups_share(Machine(OLD), BF16)


@pytest.mark.parametrize("name", MASKS)
def test_copied_heads_give_the_same(monkeypatch, name):
    asked, real = [], F.scaled_dot_product_attention

    def attention(*tensors, **options):
        asked.append(options["enable_gqa"])
        return real(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    q, k, v, _ = (t.permute(2, 0, 1, 3) for t in qkv(45))
    results = []
    for capability in (None, OLD):
        core = CoreAttention(model(attention_backend="sdpa"), Mesh.serial())
        core.machine = Machine(capability)
        results.append(core(q, k, v, AttentionMask(**MASKS[name])))
    assert asked == [True, False]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-14)


def test_auto_waits_for_the_mask_on_a_gpu_only(monkeypatch):
    assert choose_backend(model(), gpu_mesh()) == "auto" and choose_backend(model(), Mesh.serial()) == "sdpa"
    core = CoreAttention(model(attention_backend="local"), Mesh.serial())
    core.backend, core.machine = "auto", Machine(HOPPER, BOTH)
    q = torch.zeros(9, 1, 4, 8, dtype=torch.bfloat16)
    packed = AttentionMask(document_ids=torch.zeros(1, 9, dtype=torch.int64))
    masks = (AttentionMask(), AttentionMask(window=9), AttentionMask(window=8), packed)
    assert [core.backend_for(q, q, rule) for rule in masks] == ["sdpa", "sdpa", "flash", "flash"]


def test_absent_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr(attention_choice.importlib.util, "find_spec", lambda name: None)
    for backend, package in (("flash", "flash-attn"), ("te", "transformer-engine[pytorch]")):
        with pytest.raises(ConfigError) as error:
            CoreAttention(model(attention_backend=backend), gpu_mesh())
        assert f"pip install '{package}'" in str(error.value)


def test_packages_run_on_a_gpu_in_16_bits(monkeypatch):
    monkeypatch.setattr(attention_choice.importlib.util, "find_spec", lambda name: object())
    for config, mesh in ((model(), Mesh.serial()), (model(params_dtype="fp32"), gpu_mesh())):
        with pytest.raises(ConfigError, match="GPU in bf16 or fp16"):
            choose_backend(config.replace(attention_backend="flash"), mesh)


def fake_flash_attn() -> types.ModuleType:
    """The two functions of flash-attn 2 by their documentation, computed by torch."""
    module = types.ModuleType("flash_attn")

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        left, right = window_size
        i = torch.arange(q.shape[1])
        distance = i[:, None] - i[None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance <= left) if left >= 0 else seen
        seen &= (distance >= -right) if right >= 0 else seen
        seen &= (distance >= 0) if causal else seen
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        assert dropout_p == 0.0
        return out.transpose(1, 2)

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, **options):
        assert cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k) and longest_q == int(cu_q.diff().max())
        pieces = zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)
        return torch.cat([flash_attn_func(*(t[None, a:b] for t in (q, k, v)), **options)[0] for a, b in pieces])

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def fake_varlen_attn(*args: Any, **options: Any) -> torch.Tensor:
    """torch's function by its documentation; its signature is torch's own."""
    given = inspect.signature(_varlen_attn()).bind(*args, **options).arguments
    q, k, v, cu_q, cu_k, longest_q, longest_k = (given[name] for name in list(given)[:7])
    assert given["enable_gqa"] == (q.shape[1] != k.shape[1]), "torch refuses grouped heads that are not announced"
    rest = {"softmax_scale": given["scale"], "window_size": given["window_size"]}
    return fake_flash_attn().flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, **rest)


@functools.cache
def _varlen_attn() -> Any:
    """torch's own; with it comes its compiler, two seconds."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("program", mostly_slow(["flash", "varlen"], [0]))
def test_what_flash_attn_and_torch_are_asked_for(monkeypatch, program, name, groups):
    """Values and gradients against the blockwise code."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    if program == "varlen":
        _varlen_attn()  # before it is replaced
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn)
    rule = AttentionMask(**MASKS[name])
    results = []
    for backend in ("local", program):
        inputs = [t.permute(2, 0, 1, 3).requires_grad_() for t in qkv(45, g=groups)[:3]]
        core = CoreAttention(model(attention_backend="local"), Mesh.serial())
        core.backend = backend
        out = core(*inputs, rule)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_boundaries_are_computed_once_a_pass_and_live_on_the_device(monkeypatch):
    """Each of them would make the host wait for the GPU; and flash-attn takes no boundaries on the CPU."""
    counted = []
    monkeypatch.setattr(mask, "cu_seqlens", lambda ids: counted.append(ids.device.type) or REAL_BOUNDARIES(ids))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    core = CoreAttention(model(attention_backend="local"), Mesh.serial())
    core.backend = "flash"
    rule, (q, k, v, _) = AttentionMask(**MASKS["packed"]), (t.permute(2, 0, 1, 3) for t in qkv(45))
    for _ in range(3):
        core(q, k, v, rule)
    assert counted == ["cpu"]
    ids = MASKS["packed"]["document_ids"]
    borders, longest = AttentionMask(document_ids=ids).boundaries(torch.device("meta"))
    assert borders.device.type == "meta" and borders.dtype == torch.int32 and longest == REAL_BOUNDARIES(ids)[1]


REAL_BOUNDARIES = mask.cu_seqlens
