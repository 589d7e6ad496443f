"""A family of models is one file: nobody else names it, and whatever the folder holds is seen by every command."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import minimegatron
from minimegatron.checkpoint.conversion import logical_tensors, open_model
from minimegatron.checkpoint.huggingface import state_to_huggingface
from minimegatron.commands.convert import main as convert
from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import FAMILIES, PRESETS, family_config, preset
from minimegatron.models.families.family import register
from minimegatron.training.arguments import parse_args

PACKAGE = Path(minimegatron.__file__).parent
# Which class of transformers reads a tokenizer: `data` lies below `models`, and a tokenizer is read without a model.
ELSEWHERE = {"data/tokenizer_files.py"}


def strings(source: str) -> set[str]:
    """All string constants of a source but its docstrings."""
    tree = ast.parse(source)
    lone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in lone
    }


def test_a_familys_name_is_in_one_file():
    names = {*FAMILIES, *PRESETS}
    where = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if (found := strings(path.read_text()) & names)
    }
    families = {path: found for path, found in where.items() if path.startswith("models/families/")}
    assert where.keys() - families.keys() == ELSEWHERE
    assert sorted(name for found in families.values() for name in found) == sorted(names), "one is in two files"


PHANTOM = """
from minimegatron.models.families.family import Family, Row, named, one_of, register

register(
    Family(
        name="phantom",
        architecture="PhantomForCausalLM",
        fields={"position_embedding_type": "none", "add_bias_linear": False},
        presets={"phantom-tiny": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40}},
        defaults={"depth": 1, "width": 16, "heads": 2, "vocab": 40, "act": "relu2", "tie_word_embeddings": True},
        parts=(
            named({"depth": "num_layers", "width": "hidden_size"}),
            named({"heads": "num_attention_heads", "vocab": "vocab_size"}),
            one_of("act", {"relu2": "squared_relu"}, "activation", "the MLP of Phantom"),
        ),
        tensors=(
            Row("embedding.word_embeddings.weight", ("words",)),
            *(
                Row(f"decoder.layers.{{}}.{ours}", (f"block{{}}.{theirs}",), how)
                for ours, theirs, how in (
                    ("input_layernorm.weight", "n1.g", "stack"),
                    ("input_layernorm.bias", "n1.b", "stack"),
                    ("self_attention.linear_qkv.weight", "qkv", "conv_pack"),
                    ("self_attention.linear_proj.weight", "out", "transpose"),
                    ("pre_mlp_layernorm.weight", "n2.g", "stack"),
                    ("pre_mlp_layernorm.bias", "n2.b", "stack"),
                    ("mlp.linear_fc1.weight", "up", "transpose"),
                    ("mlp.linear_fc2.weight", "down", "transpose"),
                )
            ),
            Row("decoder.final_layernorm.weight", ("n.g",)),
            Row("decoder.final_layernorm.bias", ("n.b",)),
        ),
    )
)
"""


@pytest.fixture
def phantom(tmp_path, monkeypatch):
    """A file that adds a family, imported as those of the folder are; afterwards the family is gone."""
    for known in (FAMILIES, PRESETS):
        for name in ("phantom", "phantom-tiny"):
            monkeypatch.setitem(known, name, None)  # type: ignore[arg-type]
            del known[name]
    file = tmp_path / "phantom.py"
    file.write_text(PHANTOM)
    spec = importlib.util.spec_from_file_location("phantom", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_one_more_file_is_one_more_family_for_every_command(tmp_path, phantom, capsys):
    run = parse_args("--preset phantom-tiny --activation squared_relu --seq-length 8 --mock-data".split())
    config = TransformerConfig.from_dict({**preset("phantom-tiny"), "activation": "squared_relu"})
    assert run.model.position_embedding_type == "none" and run.model.hidden_size == config.hidden_size == 16
    ours = {name: torch.randn(one.shape) for name, one in logical_tensors(config).items()}
    published = tmp_path / "published"
    published.mkdir()
    save_file(state_to_huggingface(ours, config, "phantom"), published / "model.safetensors")
    (published / "config.json").write_text(json.dumps({"model_type": "phantom", "depth": 1}))
    assert parse_args(["--load", str(published), *"--seq-length 8 --mock-data".split()]).model.vocab_size == 40
    convert(["--load", str(published), "--save", str(tmp_path / "ckpt")])
    model = open_model(tmp_path / "ckpt")
    assert model.config == config and all(torch.equal(model.weights.read(name), ours[name]) for name in ours)
    convert(["--load", str(tmp_path / "ckpt"), "--save", str(tmp_path / "back"), "--to", "hf", "--hf-model", "none"])
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    assert said["model_type"] == "phantom" and said["architectures"] == ["PhantomForCausalLM"], "the first that can"
    back, there = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", published))
    assert back.keys() == there.keys() and all(torch.equal(back[name], there[name]) for name in there)


def test_a_name_is_one_familys():
    with pytest.raises(ConfigError, match="llama2-7b|llama"):
        register(FAMILIES["llama"])
    with pytest.raises(ConfigError, match="did you mean `llama`"):
        family_config("lama")
