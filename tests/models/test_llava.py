"""LLaVA: CLIP's view of a picture, logits and every gradient are those of transformers."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minimegatron.checkpoint.conversion import logical_tensors, open_model
from minimegatron.checkpoint.hf_config import config_from_huggingface, config_to_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface, state_to_huggingface
from minimegatron.config.same_model import differing
from minimegatron.data.picture_messages import resized
from minimegatron.data.pictures import Grid, patches_of
from minimegatron.errors import CheckpointError, ConfigError, DataError
from minimegatron.models.families import family_config, preset
from tests.models.in_fp64 import in_fp64
from tests.models.test_vision import (
    TOKEN,
    Theirs,
    a_picture,
    assert_every_key_means_the_same,
    assert_same,
    moved,
    read,
    texts,
)

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
# Pictures of 3 x 3 patches; the third layer is not read, and heads have 10 channels, which no RoPE could halve twice.
VISION: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip


FIELDS = {"text_config": TEXT, "vision_config": VISION, "image_token_index": TOKEN}
UNREAD = ("encoder.layers.2.", "post_layernorm.")  # of this one: behind the layer whose output is used
COUNTS = (2, 1)  # pictures of each row


@functools.cache
def llava() -> Theirs:
    """A tiny one."""
    return said(TEXT, VISION)


def said(
    text: dict[str, Any], vision: dict[str, Any], seed: int = 0, counts: tuple[int, ...] = COUNTS, **how: Any
) -> Theirs:
    """A LLaVA, and what it says of rows with so many pictures; `how` are further keys of its configuration."""
    from transformers import LlavaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    torch.manual_seed(seed)
    config = LlavaConfig(text_config=text, vision_config=vision, **{"image_token_index": TOKEN, **how})
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation = "eager"
    twin, parts = in_fp64("llava"), {"llama": in_fp64("llama").LlamaModel}
    parts["clip_vision_model"] = in_fp64("clip").CLIPVisionModel
    twin.AutoModel = SimpleNamespace(from_config=lambda part: parts[part.model_type](part))
    model = moved(
        twin.LlavaForConditionalGeneration(config),
        {"model.language_model.rotary_emb": LlamaRotaryEmbedding(config.text_config)},
    )
    ours, side, patch = config_from_huggingface(config.to_dict())[1], vision["image_size"], vision["patch_size"]
    tokens = (n := side // patch) ** 2
    rows = texts(ours, [[(side, side)] * count for count in counts], max(40, 5 + max(counts) * (tokens + 2)))
    patches = torch.stack([found for row in rows for found, _ in row[0].pictures])
    pixels = patches.view(-1, n, n, 3, patch, patch).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side, side)
    return Theirs.said(model, rows, ours, pixel_values=pixels.double())


def test_logits_and_every_gradient_are_theirs():
    theirs = llava()
    _, config = config_from_huggingface(theirs.config)
    assert theirs.batch["position_ids"].shape == theirs.batch["tokens"].shape and config.vision_num_layers == 2
    assert assert_same(theirs) == []


def test_pictures_are_those_of_their_processor():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    _, config = config_from_huggingface(llava().config)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    for height, width in ((12, 12), (20, 33), (47, 12), (9, 7)):
        picture = a_picture(height, width, height)
        theirs = processor(picture, input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]
        patches, grid = patches_of(resized(picture, config), config)
        assert grid == Grid(3, 3)
        wanted = theirs.view(3, 3, 4, 3, 4).permute(1, 3, 0, 2, 4).reshape(9, 48)
        torch.testing.assert_close(patches, wanted, rtol=0, atol=1e-5)


def test_a_picture_of_another_size_is_refused():
    _, config = config_from_huggingface(llava().config)
    for shape in ((12, 16, 3), (16, 16, 3)):
        with pytest.raises(DataError, match="the encoder sees 12 x 12 pixels"):
            patches_of(np.zeros(shape, dtype=np.uint8), config)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_config_go_both_ways(tmp_path, tied):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    keys = {**llava().config, "tie_word_embeddings": tied}
    family, config = config_from_huggingface(keys)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig.from_dict(keys)).eval()
    model.save_pretrained(tmp_path / "theirs")
    saved = open_model(tmp_path / "theirs")
    assert saved.family == family and differing(saved.config, config) == []
    ours = {name: saved.weights.read(name) for name in saved.weights.tensors}
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: one.shape for name, one in logical_tensors(config).items()
    }
    in_memory = state_from_huggingface(model.state_dict(), config, family)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in in_memory.items())
    back = state_to_huggingface(ours, config, family)
    back_again = state_from_huggingface(back, config, family)
    assert back_again.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in back_again.items())
    _, written = config_to_huggingface(config)
    (tmp_path / "ours").mkdir()
    save_file(back, tmp_path / "ours" / "model.safetensors")
    (tmp_path / "ours" / "config.json").write_text(json.dumps(written))
    _, again = config_to_huggingface(config, like=keys)  # what is kept promises no layers that are not written
    for one in (written, again):
        assert differing(config, config_from_huggingface(one)[1]) == []
        assert (one["vision_config"]["num_hidden_layers"], one["vision_feature_layer"]) == (2, -1)
    assert again["vision_config"]["image_size"] == 12 and again["text_config"] == keys["text_config"]
    _, longer = config_to_huggingface(config.replace(max_position_embeddings=512), like=keys)
    assert longer["text_config"]["max_position_embeddings"] == 512 and "max_position_embeddings" not in longer
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    assert config_from_huggingface(loaded.config.to_dict())[1] == config
    for name, tensor in loaded.state_dict().items():
        assert any(part in name for part in UNREAD) or torch.equal(tensor, model.state_dict()[name]), name
    tokens, pixels = llava().batch["tokens"][:1], torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(loaded(tokens, pixel_values=pixels).logits, model(tokens, pixel_values=pixels).logits)


def test_a_tensor_of_a_layer_that_is_computed_is_not_left_out():
    theirs, (family, config) = llava(), config_from_huggingface(llava().config)
    state = {name: tensor.float() for name, tensor in theirs.state.items()}
    for name in ("model.vision_tower.encoder.layers.1.mlp.fc3.weight", "model.vision_tower.something"):
        with pytest.raises(CheckpointError, match=name.rsplit(".", 2)[-1]):
            state_from_huggingface({**state, name: torch.zeros(2)}, config, family)


def test_every_key_means_what_it_means_to_transformers():
    from transformers import LlavaConfig

    whole = llava().config
    others: dict[str, Any] = {"hidden_act": "gelu", "vision_feature_layer": 1, "projector_hidden_act": "relu"}
    others |= {"vision_feature_select_strategy": "full", "multimodal_projector_bias": False}
    others |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 70.0, "factor": 2.0}}
    assert_every_key_means_the_same(whole, others, LlavaConfig)
    assert read({"model_type": "llava"}) == read(LlavaConfig().to_dict())
    assert read({**whole, "image_token_id": TOKEN, "vocab_size": 99}) == read(whole)
    with pytest.raises(ConfigError, match="something_new"):
        config_from_huggingface({**whole, "something_new": 3})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_config": {**VISION, "hidden_act": "gelu"}}, "hidden_act='gelu'"),
        ({"vision_config": {**VISION, "model_type": "siglip_vision_model"}}, "model_type='siglip_vision_model'"),
        ({"vision_config": {**VISION, "layer_norm_eps": 1e-6}}, "layer_norm_eps=1e-06"),
        ({"vision_config": {**VISION, "image_size": [12, 16]}}, "a number for each side"),
        ({"vision_config": {**VISION, "something_new": 1}}, "something_new"),
        ({"text_config": {**TEXT, "model_type": "qwen2"}}, "model_type='qwen2'"),
        ({"text_config": {**TEXT, "something_new": 1}}, "something_new"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy='full'"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer=.-2, -1."),
        ({"vision_feature_layer": -4}, "vision_feature_layer=-4 of an encoder with 3 layers"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ({"image_token_index": 4000}, "image_token_id=4000"),
        ({"vocab_size": 7}, "vocab_size=7 is not that of text_config"),
    ],
)
def test_what_a_config_says_otherwise_is_refused(change, message):
    keys = {"model_type": "llava", "text_config": TEXT, "image_token_index": TOKEN, "vision_config": VISION}
    assert config_from_huggingface(keys)[1].sees
    with pytest.raises(ConfigError, match=message):
        config_from_huggingface({**keys, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_image_size": None}, "a position for each patch of 4"),
        ({"vision_image_size": 13}, "a position for each patch of 4"),
        ({"vision_spatial_merge_size": 2}, "a patch of one frame is a token"),
        ({"vision_model_type": "qwen_vit"}, "pictures of any size"),
        ({"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}, "fp8_format='e4m3': the vision encoder has no such part"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message):
    _, config = config_from_huggingface(llava().config)
    with pytest.raises(ConfigError, match=message):
        config.replace(**change)


def test_the_other_family_does_not_describe_it():
    _, config = config_from_huggingface(llava().config)
    assert config_to_huggingface(config)[0] == "llava"
    with pytest.raises(ConfigError, match="cannot say"):
        config_to_huggingface(config, "qwen2_5_vl")
    assert config_to_huggingface(family_config("qwen2_5_vl", **preset("laptop-vlm")))[0] == "qwen2_5_vl"
