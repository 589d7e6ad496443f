"""MXFP4 is read as transformers reads it, bit for bit, also by a rank that needs a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimegatron.checkpoint.conversion import open_model
from minimegatron.checkpoint.mxfp4 import dequantise
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main as convert
from minimegatron.config import ParallelConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.decoder import GPTModel
from tests.axes import EP, ETP, SP, TP

E, H, F, GROUP = 4, 64, 32, 32
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks [*shape, 16] and scales [*shape] near 2^-6."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, GROUP // 2), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("scales", [(118, 124), (0, 5), (240, 252)], ids=["usual", "tiny", "huge"])
def test_the_numbers_are_transformers(scales):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, _ = packed(3, 10, 2, seed=0)
    exponents = torch.randint(*scales, (3, 10, 2), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, exponents)
    assert torch.equal(dequantise(blocks, exponents).transpose(1, 2), want) and want.abs().max() > 0


def publish(folder: Path) -> Any:
    """A folder as OpenAI publishes one; returns the model of transformers with the same weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=H, intermediate_size=F, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=E, num_experts_per_tok=2, vocab_size=99, sliding_window=7, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    state: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(model.state_dict().items()):
            if not name.endswith(("gate_up_proj", "down_proj")):
                state[name] = (tensor + 0.05 * torch.randn(tensor.shape)).bfloat16()
                tensor.copy_(state[name])
                continue
            blocks, scales = packed(E, tensor.shape[2], tensor.shape[1] // GROUP, seed=seed)
            tensor.copy_(dequantise(blocks, scales).transpose(1, 2))
            state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    # The first two are in OpenAI's files, and transformers does not read them.
    more = {"initial_context_length": 4096, "experts_per_token": 2, "quantization_config": MXFP4}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **more}))
    return model


def test_a_published_folder_says_what_transformers_says(tmp_path):
    """bf16 weights, computed in fp32, so that a wrong column would be seen; and back in transformers' own form."""
    theirs = publish(tmp_path / "published")
    model = open_model(tmp_path / "published")
    assert model.config.params_dtype == "bf16"
    ours = GPTModel(model.config.replace(params_dtype="fp32"), Mesh.serial()).eval()
    load_logical(ours, {name: model.weights.read(name) for name in model.weights.tensors})
    tokens = torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert (ours.full_logits(tokens) - theirs(tokens).logits).abs().max() <= 1e-5
    convert(["--load", str(tmp_path / "published"), "--save", str(tmp_path / "ours")])
    convert(["--load", str(tmp_path / "ours"), "--save", str(tmp_path / "back"), "--to", "hf"])
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in said and said["experts_per_token"] == 2
    back, want = load_file(tmp_path / "back" / "model.safetensors"), theirs.state_dict()
    assert back.keys() == want.keys() and all(torch.equal(back[name].float(), want[name]) for name in want)


def parts_are_boxes(rank: int, world: int, folder: str, layout: dict[str, Any]) -> bool:
    """Whether each part of the model that this rank reads by itself is its part of the whole."""
    model = open_model(Path(folder))
    part = GPTModel(model.config, Mesh.build(ParallelConfig(**layout)))
    same = []
    for name, param in logical_parameters(part):
        layout_here, whole = param.param_layout, model.weights.read(name)
        box = [(0, n) for n in whole.shape]
        if layout_here.experts is not None:
            box[0] = layout_here.experts
        if layout_here.dim is None or whole.shape != layout_here.shape:  # a vocabulary has padding
            continue
        dim = layout_here.dim
        pieces = []
        for a, b in layout_here.parts[layout_here.rank]:
            box[dim] = (a, b)
            pieces.append(model.weights.read(name, tuple(box)))
        same.append(torch.equal(torch.cat(pieces, dim), layout_here.take(whole)))
    return len(same) > 10 and all(same)


def test_a_rank_reads_its_own_experts_and_columns(ranks, tmp_path):
    publish(tmp_path / "published")
    layout = {TP: 2, SP: True, EP: 2, ETP: 2}
    assert all(ranks(4).run(parts_are_boxes, str(tmp_path / "published"), layout))


@pytest.mark.parametrize("damage", ["scale", "missing", "shape", "key", "no config"])
def test_what_is_damaged_is_refused(damage, tmp_path):
    folder = tmp_path / "published"
    publish(folder)
    state, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    name = "model.layers.1.mlp.experts.down_proj"
    error: type[Exception] = CheckpointError
    if damage == "scale":
        state[f"{name}_scales"][2, 5, 0] = 255
        words = "255"
    elif damage == "missing":
        del state[f"{name}_scales"]
        words = f"{name}_scales missing"
    elif damage == "shape":
        state[f"{name}_scales"] = state[f"{name}_scales"][:, :5].clone()
        words = f"{name}_scales"
    elif damage == "key":
        config["quantization_config"]["group"], words, error = 16, "group=16", ConfigError
    else:
        del config["quantization_config"]
        words = "down_proj_blocks is quantised"
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        weights = open_model(folder).weights
        for tensor in weights.tensors:
            weights.read(tensor)
