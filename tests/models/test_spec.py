"""Layers as data: what a spec names is what is built, and mistakes in it say where they are."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.layers.norm import Norm
from minimegatron.models.chunks import count_parameters
from minimegatron.models.decoder import build_model
from minimegatron.models.families import PRESETS, family_config, preset
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec, build_module, spec_from_name

CONFIG = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=40)
TOKENS = torch.arange(12).view(2, 6)


class DoublingNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Passing(nn.Module):
    """A whole layer of the user's own."""

    def __init__(self, config, mesh, layer_number=0, rng=None, *, shift=0.0):
        super().__init__()
        self.layer_number, self.shift = layer_number, shift

    def forward(self, x, context):
        return x + self.shift


def doubled(config):
    return decoder_layer_spec(config).with_submodule("input_layernorm", ModuleSpec(DoublingNorm))


def test_one_submodule_swapped():
    plain, swapped = (build_model(CONFIG, Mesh.serial(), 1, spec) for spec in (None, doubled(CONFIG)))
    assert [type(layer.input_layernorm) for layer in swapped.decoder.layers.values()] == [DoublingNorm] * 2
    assert {n for n, _ in plain.named_parameters()} == {n for n, _ in swapped.named_parameters()}
    with torch.no_grad():
        for layer in swapped.decoder.layers.values():
            layer.input_layernorm.weight.div_(2)
        torch.testing.assert_close(swapped(TOKENS), plain(TOKENS))


def test_the_whole_layer_swapped_with_its_own_arguments():
    model = build_model(CONFIG, Mesh.serial(), 1, ModuleSpec(Passing, params={"shift": 0.5}))
    layers = list(model.decoder.layers.values())
    assert [(layer.layer_number, layer.shift) for layer in layers] == [(0, 0.5), (1, 0.5)]
    hidden = model.embedding(TOKENS, torch.arange(6).expand(2, 6)) + 1.0
    torch.testing.assert_close(model(TOKENS), model.logits(model.decoder.final_layernorm(hidden)))


def test_from_the_command_line(monkeypatch):
    module = types.ModuleType("my_specs")
    module.doubled, module.wrong = doubled, lambda config: 3
    monkeypatch.setitem(sys.modules, "my_specs", module)
    assert spec_from_name(("my_specs", "doubled"), CONFIG).submodules["input_layernorm"].module is DoublingNorm
    for arguments, words in [
        (("my_specz", "doubled"), "cannot import 'my_specz'"),
        (("my_specs", "doubbled"), "did you mean `doubled`?"),
        (("my_specs", "wrong"), "returned a int"),
    ]:
        with pytest.raises(ConfigError) as error:
            spec_from_name(arguments, CONFIG)
        assert words in str(error.value)


def test_mistakes_name_the_class_or_the_entry():
    with pytest.raises(ConfigError, match="did you mean `mlp`"):
        decoder_layer_spec(CONFIG).with_submodule("mpl", ModuleSpec(Norm))
    with pytest.raises(ConfigError, match="building Norm from its spec failed"):
        build_module(ModuleSpec(Norm, params={"colour": "red"}), CONFIG)


# --------------------------------------------------------------------------------------------------------- the zoo


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_models_that_fit_their_name(name):
    """The count that a name promises, as the model cards give it."""
    config = family_config("gpt2", **preset(name))
    promised = {
        "gpt2-124m": 124.4e6, "gpt2-355m": 354.8e6, "gpt3-175b": 174.6e9, "llama2-7b": 6.738e9, "llama2-70b": 68.98e9,
        "llama3-8b": 8.030e9, "llama3-70b": 70.55e9, "llama3-405b": 405.85e9, "mistral-7b": 7.242e9,
        "mixtral-8x7b": 46.70e9, "mixtral-8x22b": 140.6e9, "qwen1.5-moe-a2.7b": 14.3e9, "qwen3-30b-a3b": 30.53e9,
        "qwen3-235b-a22b": 235.1e9, "deepseek-v3": 671.0e9, "qwen2.5-0.5b": 0.494e9, "qwen2.5-7b": 7.616e9,
        "qwen3-0.6b": 0.596e9, "qwen3-8b": 8.191e9, "gemma2-2b": 2.614e9, "gemma2-9b": 9.242e9, "gemma2-27b": 27.23e9,
        "olmo2-1b": 1.485e9, "olmo2-7b": 7.299e9, "olmo2-13b": 13.72e9, "olmo2-32b": 32.23e9, "gpt-oss-20b": 20.91e9,
        "gpt-oss-120b": 116.83e9, "gemma3-1b": 0.9999e9, "gemma3-4b": 3.880e9, "gemma3-12b": 11.77e9,
        "gemma3-27b": 27.01e9,
        "laptop-10m": 8.916e6, "bert-base": 110.1e6, "bert-large": 336.2e6, "megatron-bert-345m": 334.7e6,
        "t5-small": 60.51e6, "t5-base": 222.90e6, "flan-t5-small": 76.96e6, "flan-t5-base": 247.58e6,
        "mamba2-130m": 0.129e9, "mamba2-1.3b": 1.344e9, "mamba2-2.7b": 2.703e9, "nemotron-h-8b": 8.10e9,
        "nemotron-3-nano-30b-a3b": 31.58e9, "qwen3-next-80b-a3b": 79.67e9, "qwen2.5-vl-3b": 3.755e9,
        "qwen2.5-vl-7b": 8.292e9, "laptop-vlm": 0.4297e6,
        "llava-1.5-7b": 7.051e9, "llava-1.5-13b": 13.339e9, "laptop-llava": 0.3484e6,
    }  # fmt: skip
    assert count_parameters(config) == pytest.approx(promised[name], rel=2e-3)


@pytest.mark.parametrize(("h", "layers", "billions"), [(2304, 24, 1.65), (12288, 80, 145.62), (25600, 128, 1008.04)])
def test_the_published_closed_form(h, layers, billions):
    """12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)), Narayanan et al. 2021 (arXiv 2104.04473), equation 2."""
    config = family_config(
        "gpt2",
        num_layers=layers,
        hidden_size=h,
        num_attention_heads=h // 128,
        vocab_size=51200,
        max_position_embeddings=2048,
    )
    formula = 12 * layers * h * h * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
    assert formula / 1e9 == pytest.approx(billions, abs=0.006)
    assert count_parameters(config) == pytest.approx(formula, rel=1e-5)  # the form leaves out the final norm


def test_unknown_names():
    with pytest.raises(ConfigError, match="did you mean `llama3-8b`"):
        preset("llama3-8")
    with pytest.raises(ConfigError, match="no family"):
        family_config("falcon")


EMBEDDING = 201088 * 2880  # which OpenAI does not count as active


@pytest.mark.parametrize(
    "name, active",
    [
        ("mixtral-8x7b", 12.88e9),
        ("qwen3-30b-a3b", 3.35e9),
        ("qwen3-235b-a22b", 22.19e9),
        ("deepseek-v3", 37.55e9),
        ("gpt-oss-20b", 3.61e9 + EMBEDDING),
        ("gpt-oss-120b", 5.13e9 + EMBEDDING),
    ],
)
def test_parameters_that_a_token_passes(name, active):
    assert count_parameters(family_config("gpt2", **preset(name)), active=True) == pytest.approx(active, rel=1e-3)
