"""A checkpoint folder of TensorRT-LLM, put together again by a reader that knows nothing of ours: the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimegatron.commands.convert import main
from minimegatron.errors import ConfigError
from tests.checkpoint.test_convert import publish
from tests.models.test_huggingface import hf_model
from tests.thorough import mostly_thorough

transformers = pytest.importorskip("transformers")

LAYER_OF_LLAMA = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "attention.dense": "self_attn.o_proj",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
    "mlp.fc": "mlp.gate_proj",
    "mlp.gate": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
LAYER_OF_GPT2 = {
    "input_layernorm": "ln_1",
    "post_layernorm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
ENDS_OF_LLAMA = {"vocab_embedding": "model.embed_tokens", "ln_f": "model.norm"}
ENDS_OF_GPT2 = {
    "vocab_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "ln_f": "transformer.ln_f",
}


def joined(name: str, parts: list[torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """The tensor of all ranks, as the engine's layers cut it: by columns, by rows, by heads, or not at all."""
    if name == "lm_head.weight":
        return torch.cat(parts)[: config["vocab_size"]]
    if "attention.qkv" in name:
        t, d, groups = len(parts), config["head_size"], config["num_key_value_heads"]
        queries, keys = config["num_attention_heads"] // t * d, max(1, groups // t) * d
        split = [part.split([queries, keys, keys]) for part in parts]
        copies = max(1, t // groups)  # fewer key heads than ranks: each is on several
        assert all(torch.equal(split[r][i], split[r // copies * copies][i]) for r in range(t) for i in (1, 2))
        return torch.cat([torch.cat([split[r][i] for r in range(0, t, copies if i else 1)]) for i in range(3)])
    if name.endswith(("mlp.fc.weight", "mlp.fc.bias", "mlp.gate.weight", "mlp.gate.bias")):
        return torch.cat(parts)
    if name.endswith(("attention.dense.weight", "mlp.proj.weight")):
        return torch.cat(parts, 1)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def published_state(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config.json, the tensors of all ranks under Hugging Face's names)."""
    config = json.loads((folder / "config.json").read_text())
    t = config["mapping"]["tp_size"]
    files = [load_file(folder / f"rank{rank}.safetensors") for rank in range(t)]
    assert all(file.keys() == files[0].keys() for file in files)
    assert {file.name for file in folder.iterdir()} == {"config.json", *(f"rank{r}.safetensors" for r in range(t))}
    gpt2, state = config["architecture"] == "GPT2LMHeadModel", {}
    ends, of_layer = (ENDS_OF_GPT2, LAYER_OF_GPT2) if gpt2 else (ENDS_OF_LLAMA, LAYER_OF_LLAMA)
    for name in files[0]:
        tensor, kind = joined(name, [file[name] for file in files], config), name.rsplit(".", 1)[1]
        if name == "lm_head.weight":
            state[name] = tensor
        elif not name.startswith("transformer.layers."):
            state[f"{ends[name.split('.')[1]]}.{kind}"] = tensor
        else:
            _, _, n, *where = name.removesuffix(f".{kind}").split(".")
            module = ".".join(where)
            if module == "attention.qkv" and not gpt2:
                d, groups = config["head_size"], config["num_key_value_heads"]
                qkv = tensor.split([config["num_attention_heads"] * d, groups * d, groups * d])
                for letter, part in zip("qkv", qkv, strict=True):
                    state[f"model.layers.{n}.self_attn.{letter}_proj.{kind}"] = part
                continue
            turned = gpt2 and kind == "weight" and tensor.dim() == 2  # Conv1D
            before = "transformer.h" if gpt2 else "model.layers"
            state[f"{before}.{n}.{of_layer[module]}.{kind}"] = tensor.t() if turned else tensor
    return config, state


CASES = [
    (name, tp)
    for name in ("llama2", "llama2-mha-bias", "llama3.1", "qwen2.5-tied-mqa", "qwen3", "gpt2")
    for tp in (1, 2, 4)
]
FEW = [("llama2-mha-bias", 2), ("qwen2.5-tied-mqa", 4), ("qwen3", 2), ("gpt2", 2)]


@pytest.mark.parametrize(("name", "tp"), mostly_thorough(CASES, lambda case: case in FEW))
def test_the_ranks_files_are_the_model(name, tp, tmp_path):
    published = publish(name, tmp_path / "published")
    words = ["--load", published, "--save", tmp_path / "engine", "--to", "tensorrt_llm"]
    assert main([*map(str, words), "--target-tensor-parallel-size", str(tp)]) == 0
    config, state = published_state(tmp_path / "engine")
    theirs = hf_model(name)
    again = transformers.AutoModelForCausalLM.from_config(theirs.config, attn_implementation="eager").eval()
    missing, unexpected = again.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    tokens = torch.randint(0, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    hf = theirs.config
    assert config["architecture"] == type(theirs).__name__ and config["mapping"] == {
        "world_size": tp, "tp_size": tp, "pp_size": 1,
    }  # fmt: skip
    assert config["hidden_act"] == (hf.activation_function if name == "gpt2" else hf.hidden_act)
    assert config["vocab_size"] == 99 and config["dtype"] == "float32"
    if name == "llama3.1":
        assert config["rotary_base"] == hf.rope_parameters["rope_theta"]
        assert config["rotary_scaling"]["factor"] == hf.rope_parameters["factor"]


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("llama2", ["--target-tensor-parallel-size", "3"], "not to be cut into 3"),
        ("llama2", ["--target-pipeline-parallel-size", "2"], "means nothing"),
        ("mixtral", [], "not written for TensorRT-LLM"),
        ("mistral", [], "a window of"),
    ],
)
def test_what_an_engine_would_not_compute_is_refused(name, more, told, tmp_path):
    words = ["--load", publish(name, tmp_path / "published"), "--save", tmp_path / "engine", "--to", "tensorrt_llm"]
    with pytest.raises(ConfigError, match=told):
        main([*map(str, words), *more])
    assert not (tmp_path / "engine").exists()
