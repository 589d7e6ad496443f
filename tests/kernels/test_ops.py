"""Fused operations: the same model whatever computes, and one line where a wish cannot be met."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.kernels import build, choice, operators, ops
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.kernels.compare import close, random

NORM = choice.TABLE["norm"]
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100, "ffn_hidden_size": 64}
MODELS = {
    "llama, the formula": ("llama", {"num_query_groups": 2, "attention_backend": "reference"}),
    "llama, local attention": ("llama", {"num_query_groups": 2, "attention_backend": "local"}),
    "gpt2": ("gpt2", {"activation": "gelu_tanh"}),
    "mixtral": ("mixtral", {"num_experts": 4, "num_query_groups": 2}),
    "mixtral, all-to-all, drops": (
        "mixtral",
        {"num_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 0.7},
    ),
    "mixtral, padded to capacity": (  # a token is then in more experts than it has chosen
        "mixtral",
        {"num_experts": 4, "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    ),
    "gpt2, window": ("gpt2", {"sliding_window": 5, "attention_backend": "local"}),
}
FUSED = {"llama": {"heads", "swiglu"}, "gpt2": {"bias_gelu"}, "mixtral": {"heads", "swiglu", "permutation"}}
TORCH_ALONE = {"gpt2, window": {"flash_attention"}}  # the kernel knows plain causal masks alone


def loss_and_gradients(family, options, kernels):
    """Losses of every token, and gradients by name."""
    config = family_config(family, **SIZES, **options, kernels=kernels)
    model = build_model(config, Mesh.serial(), seed=0)
    ids = torch.randint(0, 100, (2, 13), generator=torch.Generator().manual_seed(0))
    loss = model(ids[:, :-1], labels=ids[:, 1:])
    loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_the_same_with_emulated_kernels(name, monkeypatch):
    """Every operation of a layer goes through the table, and back by the kernel that went forward."""
    launched, chosen, run, choose = set(), set(), operators.run, ops.choose
    for module in ("pointwise", "rope", "cross_entropy", "flash", "permute"):
        target = f"minimegatron.kernels.{module}.run"
        monkeypatch.setattr(
            target, lambda file, launcher, *a, **k: (launched.add(launcher), run(file, launcher, *a, **k))[1]
        )

    def recorded(op, *args):
        function = choose(op, *args)
        chosen.add((op, "kernel" if function is choice.TABLE[op].kernel else "torch"))
        return function

    monkeypatch.setattr(ops, "choose", recorded)
    family, options = MODELS[name]
    want, wanted = loss_and_gradients(family, options, "torch")
    expected = {"norm", "add_norm", "cross_entropy", *FUSED[family]}
    expected |= {"flash_attention"} if options.get("attention_backend") == "local" else set()
    assert chosen == {(op, "torch") for op in expected} and not launched
    chosen.clear()
    got, found = loss_and_gradients(family, options, "emulated")
    assert chosen == {(op, "torch" if op in TORCH_ALONE.get(name, ()) else "kernel") for op in expected}
    backward = {"norm": "mm_norm_backward", "cross_entropy": "mm_cross_entropy_gradient", "heads": "mm_rope"}
    backward |= {"swiglu": "mm_swiglu_backward", "bias_gelu": "mm_bias_gelu_backward", "permutation": "mm_combine_rows"}
    assert {backward[op] for op in expected if op in backward} <= launched
    assert ("mm_flash_backward" in launched) == (name == "llama, local attention")
    assert not {name for name in launched if "softmax" in name}, "the formula stays plain torch"
    close([got], [want.double()], torch.float32)
    close(found.values(), [wanted[k].double() for k in found], torch.float32, factor=5)


def test_a_model_is_the_same_with_kernels_for_cpus(monkeypatch):
    launched, run = set(), operators.run
    for module in ("pointwise", "rope", "cross_entropy", "flash"):
        target = f"minimegatron.kernels.{module}.run"
        monkeypatch.setattr(
            target, lambda file, launcher, *a, **k: (launched.add(launcher), run(file, launcher, *a, **k))[1]
        )
    want, wanted = loss_and_gradients("llama", {}, "torch")
    assert not launched
    got, found = loss_and_gradients("llama", {}, "auto")
    for part in ("norm", "swiglu", "flash"):
        assert {f"mm_{part}_forward", f"mm_{part}_backward"} <= launched
    assert {"mm_heads", "mm_heads_backward", "mm_cross_entropy_statistics", "mm_cross_entropy_gradient"} <= launched
    close([got], [want.double()], torch.float32)
    close(found.values(), [wanted[k].double() for k in found], torch.float32, factor=5)


def test_label_smoothing_and_padded_vocabulary():
    tp, logits = Mesh.serial().tp, random(3, 4, 16)
    target = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(0))
    results = []
    for kind, z in (("emulated", logits.clone()), ("torch", logits.double())):
        z.requires_grad_()
        loss = vocab_parallel_cross_entropy(z, target, tp, vocab_size=11, label_smoothing=0.1, kernels=kind)
        loss.backward(random(3, 4, seed=2).to(loss.dtype))
        results.append((loss.detach(), z.grad))
    close(*results, torch.float32)


def test_auto_on_a_cpu_is_the_kernel_for_cpus_and_without_a_compiler_torch(fresh, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.choose("norm", "auto", random(3)) is NORM.native
        assert choice.choose("norm", "auto", random(3).half()) is NORM.torch
        assert choice.choose("norm", "torch", random(3)) is NORM.torch
        choice._obstacle_on_a_cpu.cache_clear()
        monkeypatch.setattr(build, "compiler", lambda target: None)
        assert choice.choose("norm", "auto", random(3)) is NORM.torch


def test_dtypes_that_kernels_do_not_know_are_torchs():
    assert choice.choose("norm", "emulated", random(3), random(3, dtype=torch.bfloat16)) is NORM.torch
    assert choice.choose("norm", "emulated", torch.ones(3, dtype=torch.int32)) is NORM.torch
    assert choice.choose("norm", "emulated", random(3), None) is NORM.kernel


@pytest.fixture
def fresh():
    cached = (choice._possible, choice._obstacle_on_a_cpu, choice._available, choice._say, operators.library)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_a_wish_for_the_gpu_on_a_cpu_is_answered_in_one_line(fresh):
    with pytest.warns(UserWarning) as said:
        for _ in range(3):
            assert choice.choose("norm", "cuda", random(3)) is NORM.torch
    assert [str(w.message) for w in said] == [
        "kernels=cuda: torch computes instead, because the tensors are on the CPU"
    ]


@pytest.mark.parametrize("why", ["no_compiler", "nowhere to write"])
def test_without_compiler_or_cache_the_results_are_torchs(why, fresh, monkeypatch, tmp_path):
    if why == "no_compiler":
        monkeypatch.setattr(build, "compiler", lambda target: None)
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MINIMEGATRON_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    family, options = MODELS["llama, local attention"]
    want, wanted = loss_and_gradients(family, options, "torch")
    with pytest.warns(UserWarning, match="kernels=emulated: torch computes instead") as said:
        got, found = loss_and_gradients(family, options, "emulated")
    assert torch.equal(got, want) and all(torch.equal(found[k], wanted[k]) for k in found)
    (line,) = [str(w.message) for w in said]
    assert ("no g++" if why == "no_compiler" else "MINIMEGATRON_KERNEL_CACHE") in line and "\n" not in line


def test_the_table_has_every_kernel_file_every_activation_and_a_function_for_every_operation():
    assert sorted({row.file for row in choice.TABLE.values() if row.file and row.kernel}) == build.sources()
    for_cpus = {row.inference_file or row.file for row in choice.TABLE.values() if row.inference or row.native}
    assert sorted({"quantized", "few_rows", *for_cpus}) == build.sources("cpp")
    assert all((row.file is None) == (row.kernel is None) for row in choice.TABLE.values())
    (activation,) = [f for f in dataclasses.fields(TransformerConfig) if f.name == "activation"]
    activations = set(activation.metadata["choices"])
    assert activations <= set(choice.TABLE)
    assert all(callable(getattr(ops, name)) for name in set(choice.TABLE) - activations)
