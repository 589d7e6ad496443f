"""Every key of a Hugging Face configuration is read as transformers reads it, known to be harmless, or refused.

Each key of each family is taken out and changed, one at a time. transformers says what the file then means: by the
configuration that its class makes of it, and by the logits of a tiny model.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.config.same_model import differing
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.logical import load_logical
from minimegatron.models.chunks import build_stage
from minimegatron.models.families import FAMILIES, preset
from minimegatron.models.families.keys import HARMLESS
from tests.models.test_bert import SIZES
from tests.models.test_huggingface import MODELS as DECODERS
from tests.models.test_huggingface import in_fp64_of
from tests.models.test_t5 import SIZES as OF_T5
from tests.thorough import mostly_thorough

TINY = {"gpt2": "gpt2", "llama": "llama2", "mistral": "mistral", "qwen2": "qwen2.5", "qwen3": "qwen3"}
TINY |= {"mixtral": "mixtral", "qwen2_moe": "qwen2_moe", "qwen3_moe": "qwen3_moe", "deepseek_v3": "deepseek_v3"}
TINY |= {name: name for name in ("gemma2", "olmo2", "mamba2", "nemotron_h", "qwen3_next")}
TINY |= {"gpt_oss": "gpt_oss", "gemma3_text": "gemma3"}
ENCODERS = {"bert": ("BertConfig", SIZES), "megatron-bert": ("MegatronBertConfig", SIZES)}
ENCODERS["t5"] = "T5Config", OF_T5
TINY |= {name: name for name in ENCODERS}
MODELS = {**DECODERS, **ENCODERS}


def file_of(family: str) -> dict[str, Any]:
    """What `save_pretrained` writes for a tiny model."""
    import transformers

    cls, fields = MODELS[TINY[family]]
    return getattr(transformers, cls)(**fields).to_dict()


def as_transformers_reads(hf: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return transformers.CONFIG_MAPPING[hf["model_type"]].from_dict(hf).to_dict()


def test_every_family_has_a_tiny_model():
    sees = {name for name, family in FAMILIES.items() if family.has("vision")}  # tests/models/test_vision
    assert TINY.keys() == FAMILIES.keys() - sees


@pytest.mark.parametrize("family", TINY)
def test_a_missing_key_has_the_default_of_its_class(family):
    whole, compared = file_of(family), 0
    for key in whole.keys() - {"model_type"}:
        file = {k: v for k, v in whole.items() if k != key}
        try:
            meant = as_transformers_reads(dict(file))
        except Exception:  # transformers cannot make a model of it either
            continue
        try:
            wanted = config_from_huggingface(meant)[1]
        except ConfigError:
            with pytest.raises(ConfigError):
                config_from_huggingface(file)
            continue
        assert config_from_huggingface(file)[1] == wanted, f"{family} without {key}"
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("family", TINY)
def test_the_defaults_are_those_of_the_class(family):
    """Whole: a file that says nothing but its family."""
    ours = config_from_huggingface({"model_type": family})[1]
    assert ours == config_from_huggingface(as_transformers_reads({"model_type": family}))[1]


# No part of what a model computes: names, versions, how weights are stored, in which form it answers.
NAMES = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id"}
NAMES |= {"problem_type", "tokenizer_class", "return_dict", "text_config", "vision_config"}
OTHER: dict[str, Any] = {
    "hidden_act": "gelu", "activation_function": "gelu", "num_key_value_heads": 1, "vocab_size": 101,
    "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0, "mlp_only_layers": [0], "head_dim": 8,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}, "n_inner": 80,
    "num_attention_heads": 2, "n_head": 2, "scale_attn_weights": False, "hidden_activation": "silu",
    "mlp_hidden_act": "silu", "feed_forward_proj": "gated-silu", "time_step_limit": [0.1, 0.3], "num_heads": 2,
    "quantization_config": {"quant_method": "fp8"}, "something_new": 3, "pruned_heads": {0: [0]},
}  # fmt: skip
KINDS_OF_LAYERS = ("sliding_attention", "linear_attention", "full_attention")


def other_values(key: str, value: Any) -> list[Any]:
    """Values that a key does not have; several where none says of which type they are."""
    if key in OTHER and value != OTHER[key]:
        return [OTHER[key]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 8]
    if isinstance(value, float):
        return [10 * value or 0.5]
    if isinstance(value, str):
        return ["something_new"]
    if value is None:
        return [5, True, 2.0]
    if isinstance(value, list) and {*value} & {*KINDS_OF_LAYERS}:
        return [[kind] * len(value) for kind in KINDS_OF_LAYERS if [kind] * len(value) != value]
    return [[], value[:1]] if isinstance(value, list | tuple) else [{"something": 1}]


def keys_of(config: Any) -> dict[str, Any]:
    """Every key that its class has, whether a file has it or not."""
    named = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    return {**named, **config.to_dict(), "quantization_config": None, "something_new": None}


def changes(family: str) -> list[tuple[str, dict[str, Any]]]:
    """For every key of a class other values, and what must change with it."""
    import transformers

    file, found = file_of(family), []
    for key, value in keys_of(transformers.CONFIG_MAPPING[family].from_dict(dict(file))).items():
        also: dict[str, Any] = {}
        if key == "max_window_layers":
            also |= {"use_sliding_window": True, "sliding_window": 5}
        if key == "layer_types" and "use_sliding_window" in file:
            also |= {"use_sliding_window": True, "sliding_window": 5}
        if key == "use_sliding_window":
            also |= {"sliding_window": 5, "max_window_layers": 0, "layer_types": None}
        if key in ("max_window_layers", "num_hidden_layers") and "layer_types" in file:
            also["layer_types"] = None
        found += [(key, {key: other, **also}) for other in ([] if key in NAMES else other_values(key, value))]
    return found


def _theirs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits; a model with two parts reads the first half and continues the second."""
    half = tokens.shape[1] // 2
    two = model.config.is_encoder_decoder
    given = {"input_ids": tokens[:, :half], "decoder_input_ids": tokens[:, half:]} if two else {"input_ids": tokens}
    if not two and "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False  # their cache needs a layer of attention
    said = model(**given, return_dict=True)
    return said["prediction_logits"] if "prediction_logits" in said else said["logits"]


def _ours(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    if not model.config.has("cross_attention"):
        return model.full_logits(tokens)
    return model(tokens)[..., : model.config.vocab_size].transpose(0, 1)


@pytest.mark.parametrize("family", mostly_thorough(TINY, lambda family: family in ("llama", "qwen3", "deepseek_v3")))
def test_a_changed_key_changes_the_model_as_it_does_theirs_or_is_refused(family):
    """Those as well that are said to be without effect."""
    import transformers

    read = []
    for key, change in changes(family):
        file = {**file_of(family), **change}
        try:
            _, config = config_from_huggingface(dict(file))
        except ConfigError as error:
            assert error.fix
            continue
        torch.manual_seed(0)
        kind: Any = transformers.AutoModelForPreTraining if family in ENCODERS else transformers.AutoModelForCausalLM
        try:
            its = transformers.CONFIG_MAPPING[family].from_dict(dict(file))
            theirs = kind.from_config(its, attn_implementation="eager").eval()
        except Exception:  # transformers cannot make a model of it either
            continue
        with torch.no_grad():
            for param in theirs.parameters():
                param.add_(0.1 * torch.randn_like(param))
            tokens = torch.randint(0, 90, (1, 24), generator=torch.Generator().manual_seed(1))
            if config.has("cross_attention"):
                config = config.replace(decoder_seq_length=12)
            ours = build_stage(config, Mesh.serial()).eval()
            load_logical(ours, state_from_huggingface(theirs.state_dict(), config, family))
            if family == "qwen3_next":  # eight layers of fp32 are 2e-5 apart
                theirs, ours = in_fp64_of(theirs).double(), ours.double()
            wanted = _theirs(theirs, tokens)
            difference = (_ours(ours, tokens) - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
        assert difference < 2e-5, f"{family} with {change}"
        read.append(key)
    assert len({*read} - HARMLESS) >= 6 and len({*read} & HARMLESS) >= 6, read


@pytest.mark.parametrize(
    "key", ["quantization_config", "something_new", "add_cross_attention", "rope_parameters.something"]
)
@pytest.mark.parametrize("family", ["gpt2", "llama", "deepseek_v3"])
def test_an_unknown_key_is_refused_by_its_name(family, key):
    file = file_of(family)
    if "." in key:
        if family == "gpt2":
            pytest.skip("has no RoPE")
        file["rope_parameters"] = {**file["rope_parameters"], "something": 1}
    else:
        file[key] = True
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        config_from_huggingface(file)


def _class_of(family: str) -> type:
    import transformers

    return getattr(transformers, FAMILIES[family].architecture)


@pytest.mark.parametrize("family", TINY)
def test_no_key_is_read_that_the_class_does_not_have(family):
    """By its attributes, or by the code of the model or its configuration, which ask for some that a file may add."""
    import transformers

    config = transformers.CONFIG_MAPPING[family]()
    code = "".join(inspect.getsource(inspect.getmodule(cls)) for cls in (_class_of(family), type(config)))
    names = {**FAMILIES[family].defaults, **FAMILIES[family].aliases}
    assert [
        k for k in names if k != "rope_theta" and not hasattr(config, k) and not re.search(rf'"{k}"|\.{k}\b', code)
    ] == []


FOREIGN = {
    "sliding_window": 8, "attention_bias": True, "mlp_bias": True, "qkv_bias": True,
    "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "num_experts": 4,
    "q_lora_rank": 24, "rope_interleave": True, "rope_theta": 77.0, "partial_rotary_factor": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("family", TINY)
def test_a_key_of_other_families_is_refused(family):
    """transformers passes over it, or fails: what computes with it is another program."""
    seen = {"partial_rotary_factor"}
    for key, value in FOREIGN.items():
        if key in FAMILIES[family].defaults:
            continue
        seen.add(key)
        with pytest.raises(ConfigError, match=key):
            config_from_huggingface({**file_of(family), key: value})
        if value is True and key not in ("qkv_bias", "rope_interleave"):  # off, as the family has it anyway
            config_from_huggingface({**file_of(family), key: False})
    assert len(seen) >= 5
    if "attention_bias" in FAMILIES[family].defaults and "mlp_bias" in seen:  # with both, Llama's model would fit
        with pytest.raises(ConfigError, match="mlp_bias"):
            config_from_huggingface({**file_of(family), "attention_bias": True, "mlp_bias": True})
    if "rope_theta" in FAMILIES[family].defaults:
        for kind in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}):
            table = {**kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            if family == "deepseek_v3" and kind["rope_type"] == "linear":
                continue
            if "partial_rotary_factor" in FAMILIES[family].defaults:
                assert config_from_huggingface({**file_of(family), "rope_parameters": table})[1].rotary_percent == 0.5
                continue
            nested = "rope_local_base_freq" in FAMILIES[family].defaults
            for part in (0.5, 1.0):  # the second says what is so
                tables: dict[str, Any] = {**table, "partial_rotary_factor": part}
                file = {**file_of(family), "rope_parameters": {"full_attention": tables} if nested else tables}
                if part == 1.0:
                    assert config_from_huggingface(file)[1].rotary_percent == 1.0
                    continue
                with pytest.raises(ConfigError, match=f"partial_rotary_factor=0.5 is not {family}'s"):
                    config_from_huggingface(file)


def test_files_of_transformers_4():
    """RoPE in two keys of its own, layers with a window by `max_window_layers`."""
    llama = file_of("llama")
    del llama["rope_parameters"]
    llama |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}
    model = config_from_huggingface(llama)[1]
    assert (model.rotary_base, model.rope_scaling_type, model.rope_scaling_factor) == (5e5, "linear", 2.0)
    qwen = file_of("qwen2")
    del qwen["layer_types"]
    qwen |= {"use_sliding_window": True, "sliding_window": 8}
    for first, wanted in ((0, 8), (2, None), (28, None)):
        assert config_from_huggingface({**qwen, "max_window_layers": first})[1].sliding_window == wanted
    with pytest.raises(ConfigError, match="different attention"):
        config_from_huggingface({**qwen, "max_window_layers": 1})


_NVIDIA = {
    "attention_bias": False, "attention_dropout": 0.0, "conv_kernel": 4, "expand": 2, "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8, "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_min": 0.001,
    "time_step_max": 0.1, "time_step_floor": 1e-4, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
    "vocab_size": 131072,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": _NVIDIA | {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "attention_head_dim": 128,
        "chunk_size": 256, "hidden_size": 4096, "intermediate_size": 21504, "mamba_num_heads": 128,
        "max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    "nemotron-3-nano-30b-a3b": _NVIDIA | {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "chunk_size": 128,
        "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "mamba_num_heads": 64, "n_group": 1,
        "max_position_embeddings": 262144, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True, "topk_group": 1,
        "num_experts_per_tok": 6, "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "mamba_ssm_cache_dtype": "float32",
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 151936,
    },
    "mamba2-130m": {
        "model_type": "mamba2", "num_hidden_layers": 24, "hidden_size": 768, "vocab_size": 50288, "state_size": 128,
        "num_heads": 24, "head_dim": 64, "expand": 2, "conv_kernel": 4, "n_groups": 1, "chunk_size": 256,
        "time_step_limit": [0.0, float("inf")], "rms_norm": True, "norm_before_gate": True, "use_bias": False,
        "use_conv_bias": True, "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "residual_in_fp32": True,
        "time_step_rank": 48, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_files_of_hybrids_are_the_presets(name):
    assert not differing(config_from_huggingface(PUBLISHED[name])[1], TransformerConfig.from_dict(preset(name)))


def test_a_head_beside_a_tied_embedding_must_be_equal_to_it():
    import transformers

    hf = {**file_of("llama"), "tie_word_embeddings": True}
    family, config = config_from_huggingface(hf)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig.from_dict(hf)).eval()
    state = {**theirs.state_dict(), "lm_head.weight": torch.randn(99, 64)}
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        state_from_huggingface(state, config, family)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    assert "output_layer.weight" not in state_from_huggingface(state, config, family)


def test_two_names_of_one_key_must_agree():
    for family in TINY:
        names = FAMILIES[family].aliases
        for other, name in names.items():
            file = {k: v for k, v in file_of(family).items() if k not in (*names, *names.values())}
            with pytest.raises(ConfigError, match="differently"):
                config_from_huggingface({**file, other: 4, name: 8})
