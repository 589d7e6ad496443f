"""Adapters of PEFT: theirs give our model their logits, and ours give theirs ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.checkpoint.peft import CONFIG, from_peft, read_adapter, write_adapter
from minimegatron.cli import main
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.logical import gather_logical, load_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel
from tests.models.test_huggingface import hf_model
from tests.thorough import SLOW

pytestmark = SLOW  # to import PEFT takes three seconds
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAME = "qwen2.5-tied-mqa"


def theirs(folder: Path, modules: list[str], seed: int = 0) -> Any:
    """A model of transformers with a random adapter, which is saved in the folder."""
    import peft

    model = peft.get_peft_model(
        hf_model(NAME), peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, task_type="CAUSAL_LM")
    )
    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.normal_(0, 0.2)
    model.save_pretrained(str(folder))
    return model.eval()


def with_adapter(folder: Path) -> Any:
    """A model of transformers with the adapter of a folder, by PEFT."""
    import peft

    return peft.PeftModel.from_pretrained(hf_model(NAME), str(folder)).eval()


def ours(folder: str, parallel: ParallelConfig, state: dict[str, Any], described: dict[str, Any]) -> GPTModel:
    """Our model with the adapter of a folder."""
    adapter = read_adapter(Path(folder))
    family, config = config_from_huggingface(described)
    config = config.replace(lora_rank=adapter.rank, lora_alpha=adapter.alpha)
    model = GPTModel(config, Mesh.build(parallel)).eval()
    weights = state_from_huggingface(state, config, family)
    adapters = {name: param for name, param in logical_parameters(model) if layout_of(param).added}
    zeros = {name: torch.zeros(layout_of(param).shape) for name, param in adapters.items()}
    load_logical(model, {**weights, **zeros, **from_peft(adapter, config, family)})
    return model


def logits_of(
    rank: int, world: int, folder: str, layout: dict[str, Any], state: Any, described: Any, tokens: Any
) -> Any:
    with torch.no_grad():
        return ours(folder, ParallelConfig(**layout), state, described).full_logits(tokens)


@pytest.mark.parametrize("modules", [ALL, ["q_proj", "v_proj"]])
def test_their_adapter_gives_our_model_their_logits_and_back(ranks: Any, tmp_path: Path, modules: list[str]) -> None:
    model, tokens = theirs(tmp_path / "theirs", modules), torch.arange(24).view(2, 12) % 50
    base = hf_model(NAME)
    with torch.no_grad():
        want = model(tokens).logits
    given = (base.state_dict(), base.config.to_dict(), tokens)
    alone = logits_of(0, 1, str(tmp_path / "theirs"), {}, *given)
    assert (alone - want).abs().max() < 2e-5 and (alone - base(tokens).logits).abs().max() > 0.05
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for found in ranks(2).run(logits_of, str(tmp_path / "theirs"), layout, *given):
        assert (found - want).abs().max() < 2e-5
    mine = ours(str(tmp_path / "theirs"), ParallelConfig(), *given[:2])
    tensors = {n: gather_logical(p.detach(), layout_of(p), Mesh.serial()) for n, p in logical_parameters(mine)}
    write_adapter(tmp_path / "ours", tensors, mine.config, "qwen2", "base")
    again = with_adapter(tmp_path / "ours")
    with torch.no_grad():
        assert (again(tokens).logits - want).abs().max() < 2e-6


def test_what_is_no_plain_adapter_of_the_model_is_refused(tmp_path: Path) -> None:
    theirs(tmp_path / "one", ["q_proj"])
    config = tmp_path / "one" / CONFIG
    described = json.loads(config.read_text())
    config.write_text(json.dumps({**described, "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora is True"):
        read_adapter(tmp_path / "one")
    config.write_text(json.dumps(described))
    family, model = config_from_huggingface(hf_model(NAME).config.to_dict())
    other = model.replace(lora_rank=3, lora_target_modules=("linear_fc1",))
    with pytest.raises(CheckpointError, match="belong to no adapted layer"):
        from_peft(read_adapter(tmp_path / "one"), other, family)
    with pytest.raises(ConfigError, match="the model has no adapter"):
        from_peft(read_adapter(tmp_path / "one"), model, family)
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        read_adapter(tmp_path)
    gpt2 = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, lora_rank=2)
    with pytest.raises(ConfigError, match="has no adapter in PEFT's format"):
        write_adapter(tmp_path / "none", {}, gpt2, "gpt2")


def test_a_checkpoint_with_an_adapter_is_exported_and_merged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Import, export and merge by the command; transformers and PEFT compute the same from what it writes."""
    import transformers

    base, tokens = hf_model(NAME), torch.arange(24).view(2, 12) % 50
    base.save_pretrained(str(tmp_path / "base"))
    model = theirs(tmp_path / "theirs", ALL)
    with torch.no_grad():
        want = model(tokens).logits
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    words = ["--load", str(tmp_path / "base"), "--adapter", str(tmp_path / "theirs"), "--save", run]
    assert main(["lora", "import", *words]) == 0
    assert main(["lora", "export", "--load", run, "--save", out]) == 0
    assert main(["lora", "merge", "--load", run, "--save", f"{out}-merged"]) == 0
    assert "8 adapters merged" in capsys.readouterr().out
    again = with_adapter(Path(out))
    merged = transformers.AutoModelForCausalLM.from_pretrained(f"{out}-merged", attn_implementation="eager").eval()
    with torch.no_grad():
        assert (again(tokens).logits - want).abs().max() < 2e-6 and (merged(tokens).logits - want).abs().max() < 2e-5
    assert main(["lora", "merge", "--load", str(tmp_path / "base"), "--save", f"{out}-2"]) == 2
    assert "has no adapters" in capsys.readouterr().err
