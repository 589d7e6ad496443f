"""Published models and checkpoints, one into the other: nothing is lost, and what would be is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimegatron.checkpoint import sources
from minimegatron.checkpoint.conversion import Model, checked, logical_tensors, open_model, target, write_model
from minimegatron.checkpoint.hf_config import config_to_huggingface
from minimegatron.checkpoint.hf_folder import INDEX
from minimegatron.checkpoint.shard_file import read_header
from minimegatron.checkpoint.sources import InMemory, Source
from minimegatron.commands.convert import main
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError, MinimegatronError
from minimegatron.memory import Tracker
from minimegatron.models.families import PRESETS, family_config, preset
from tests.models import test_bert, test_llava, test_t5, test_vision
from tests.models.test_huggingface import EXPERTS, FAMILIES, hf_model


@functools.cache
def _bytes(name: str) -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        hf_model(name).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def publish(name: str, folder: Path) -> Path:
    """The folder of a tiny published model."""
    folder.mkdir()
    for file, content in _bytes(name).items():
        (folder / file).write_bytes(content)
    return folder


def convert(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
def test_there_and_back_is_exact_and_speaks_in_transformers(name, tmp_path):
    import transformers

    published = publish(name, tmp_path / "published")
    convert("--load", published, "--save", tmp_path / "ours", "--max-shard-size", "40KB")
    convert("--load", tmp_path / "ours", "--save", tmp_path / "back", "--max-shard-size", "100KB")
    convert("--load", tmp_path / "ours", "--save", tmp_path / "own", "--hf-model", "none")  # config.json of our making
    before = tensors_of(published)
    tokens = torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = hf_model(name)(tokens).logits
        for folder in (tmp_path / "back", tmp_path / "own"):
            after = tensors_of(folder)
            assert after.keys() == before.keys()
            assert all(after[k].dtype == before[k].dtype and torch.equal(after[k], before[k]) for k in before)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            assert (loaded(tokens).logits - wanted).abs().max() <= 1e-5


OTHERS = {
    "t5": ("T5ForConditionalGeneration", test_t5.KINDS["1.0"]),
    "bert": ("BertForPreTraining", test_bert.SIZES),
    "megatron-bert": ("MegatronBertForMaskedLM", test_bert.SIZES),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", test_vision.FIELDS),
    "llava": ("LlavaForConditionalGeneration", test_llava.FIELDS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_there_and_back_of_encoders_and_of_models_that_see(name, tmp_path):
    """Every tensor that is written is the published one, and all are that transformers reads."""
    import transformers

    cls, fields = OTHERS[name]
    kind = getattr(transformers, cls)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    model.save_pretrained(tmp_path / "published")
    convert("--load", tmp_path / "published", "--save", tmp_path / "ours", "--max-shard-size", "40KB")
    for how in ("back", "own"):
        own = ["--hf-model", "none"] if how == "own" else []
        convert("--load", tmp_path / "ours", "--save", tmp_path / how, "--max-shard-size", "100KB", *own)
        loaded = kind.from_pretrained(tmp_path / how)
        after, before = loaded.state_dict(), model.state_dict()
        unread = {n for n in before if any(part in n for part in test_llava.UNREAD)} if name == "llava" else set()
        assert before.keys() - unread <= after.keys() and len(unread) < len(before) / 4
        assert all(torch.equal(after[n], before[n]) for n in before.keys() - unread)


def test_files_are_as_large_as_allowed_and_the_index_names_them(tmp_path):
    published = publish("qwen3_moe", tmp_path / "published")
    convert("--load", published, "--save", tmp_path / "ours", "--max-shard-size", "60KB")
    convert("--load", tmp_path / "ours", "--save", tmp_path / "back", "--max-shard-size", "60KB")
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    files = sorted((tmp_path / "back").glob("model-*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert index["weight_map"] == {name: file.name for file in files for name in read_header(file)[0]}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors_of(published).values())
    for file in (*files, *tmp_path.glob("ours/iter_0000000/*.safetensors")):
        sizes = [entry.stop - entry.start for entry in read_header(file)[0].values()]
        assert sum(sizes) <= 60_000 and len(sizes) > 0


def test_the_tokenizer_travels_both_ways(tmp_path):
    published = publish("llama2", tmp_path / "published")
    (published / "tokenizer.json").write_text('{"a": 1}')
    (published / "README.md").write_text("a model card")
    convert("--load", published, "--save", tmp_path / "ours")
    convert("--load", tmp_path / "ours", "--save", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "back" / "README.md").exists()


# ------------------------------------------------------------------------------------------------- memory


class _Seen:
    """A source whose tensors a tracker sees from the moment they are read."""

    def __init__(self, source: Source, tracker: Tracker) -> None:
        self.source, self.tracker, self.tensors = source, tracker, source.tensors

    def read(self, name: str, box: Any = None) -> torch.Tensor:
        tensor = self.source.read(name, box)
        self.tracker.see(tensor)
        return tensor


@pytest.mark.parametrize("name", ["llama2", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["ours", "hf"])
def test_no_more_than_one_and_a_half_files_are_in_memory(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 4096)
    published = publish(name, tmp_path / "published")
    if kind == "hf":
        convert("--load", published, "--save", tmp_path / "ours")
    tracker = Tracker()
    model = open_model(published if kind == "ours" else tmp_path / "ours")
    view = model.weights
    if isinstance(view, sources.View):
        view.source = _Seen(view.source, tracker)  # what is read from the files counts too
    config, weights = checked(Model(model.kind, model.config, _Seen(view, tracker), model.companions), None)
    tensors, keys = target(kind, config, weights, model.companions, None)
    total = sum(d.nbytes for d in tensors.tensors.values())
    with tracker:
        write_model(kind, _Seen(tensors, tracker), config, keys, tmp_path / "written", 30_000, model.companions)
    files = [file.stat().st_size for file in (tmp_path / "written").rglob("*.safetensors")]
    assert 24_000 < tracker.peak.total < 1.25 * max(files) < total / 4  # 1.5 is promised; this sees a second tensor


# ------------------------------------------------------------------------------------------------- refused


def refused(*words: Any) -> str:
    """What the command says, and that it leaves nothing behind."""
    with pytest.raises(MinimegatronError) as error:
        main([str(word) for word in words])
    save = words[words.index("--save") + 1]
    assert not save.exists() and not [p for p in save.parent.iterdir() if p.name.startswith(".")]
    assert error.value.fix
    return str(error.value)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


CHANGES = {
    "a field that is not known": ({"attention_sinks": 4}, "attention_sinks=4"),
    "another activation": ({"hidden_act": "relu"}, "relu"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "a pad token outside": ({"pad_token_id": 99}, "pad_token_id is 99, and the vocabulary has the ids 0 to 98"),
    "a vocabulary that was padded": ({"vocab_size": 90}, "cut the embedding to vocab_size, or set vocab_size to"),
    "other heads": ({"num_key_value_heads": 4}, "k_proj.weight has shape (32, 64), and"),
    "more layers": ({"num_hidden_layers": 3}, "missing model.layers.2.self_attn.q_proj.weight"),
    "fewer layers": ({"num_hidden_layers": 1}, "left over model.layers.1.input_layernorm.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_configuration_that_is_not_the_models_is_refused(change, tmp_path):
    published = publish("llama2", tmp_path / "published")
    change_config(published, **CHANGES[change][0])
    assert CHANGES[change][1] in refused("--load", published, "--save", tmp_path / "ours")


def test_a_tokenizer_with_a_token_more_than_the_model_is_refused(tmp_path):
    """The pitfall of `tokenizer.add_special_tokens({"pad_token": "[PAD]"})`."""
    published = publish("qwen2.5", tmp_path / "published")
    tokens = [{"id": 98, "content": "<|endoftext|>"}, {"id": 99, "content": "[PAD]"}]
    (published / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    said = refused("--load", published, "--save", tmp_path / "ours")
    assert "'[PAD]' has the id 99, and the vocabulary has the ids 0 to 98" in said and "<|endoftext|>" in said
    (published / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens[:1]}))
    convert("--load", published, "--save", tmp_path / "ours")


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Put tensors into the file, or with None take them out."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


EDITS = {
    "left over adapter.weight": {"adapter.weight": torch.ones(2)},
    "missing model.norm.weight": {"model.norm.weight": None},
    "model.norm.weight holds numbers that are not finite": {"model.norm.weight": torch.full((64,), torch.inf)},
    "model.norm.weight has shape (65,)": {"model.norm.weight": torch.ones(65)},
    "lm_head.weight is torch.int8": {"lm_head.weight": torch.ones(99, 64, dtype=torch.int8)},
    "model.norm.weight is torch.float64": {"model.norm.weight": torch.ones(64, dtype=torch.float64)},
    "say --bf16": {"model.embed_tokens.weight": torch.ones(99, 64, dtype=torch.bfloat16)},
    "have different dtypes": {"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("said", EDITS)
def test_weights_that_are_not_the_models_are_refused(said, tmp_path):
    published = publish("llama2", tmp_path / "published")
    edit(published, **EDITS[said])  # type: ignore[arg-type]
    words = refused("--load", published, "--save", tmp_path / "ours")
    if "(65,)" in said:
        assert "decoder.final_layernorm.weight has shape (65,), by the configuration it is (64,)" in words
    else:
        assert said in words


def test_rounding_happens_where_it_was_asked_for(tmp_path):
    published = publish("deepseek_v3", tmp_path / "published")
    convert("--load", published, "--save", tmp_path / "ours", "--bf16")
    convert("--load", tmp_path / "ours", "--save", tmp_path / "back")
    before, after = tensors_of(published), tensors_of(tmp_path / "back")
    for name, tensor in before.items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert after[name].dtype == kept and torch.equal(after[name], tensor.to(kept)), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_index_stays_in_its_folder(tmp_path):
    published = publish("llama2", tmp_path / "published")
    (published / "model.safetensors").unlink()
    (published / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../other/model.safetensors"}}))
    assert "outside of its folder" in refused("--load", published, "--save", tmp_path / "ours")


def test_what_is_there_is_not_overwritten(tmp_path):
    published = publish("llama2", tmp_path / "published")
    convert("--load", published, "--save", tmp_path / "ours")
    for load, save in ((published, tmp_path / "ours"), (tmp_path / "ours", published)):
        before = sorted(path.name for path in save.rglob("*"))
        with pytest.raises(CheckpointError, match="something here already"):
            main(["--load", str(load), "--save", str(save)])
        assert sorted(path.name for path in save.rglob("*")) == before


def test_a_byte_that_changed_in_a_checkpoint_is_refused(tmp_path):
    convert("--load", publish("llama2", tmp_path / "published"), "--save", tmp_path / "ours")
    (file,) = tmp_path.glob("ours/iter_*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert str(file) in refused("--load", tmp_path / "ours", "--save", tmp_path / "back")


UNSAYABLE = {
    "layernorm_zero_centered_gamma": {"layernorm_zero_centered_gamma": True},
    "mtp_num_layers": {"mtp_num_layers": 1},
    "activation": {"activation": "squared_relu"},
    "position_embedding_type": {"position_embedding_type": "none"},
    "rotary_interleaved": {"rotary_interleaved": True},
}


@pytest.mark.parametrize("field", UNSAYABLE)
def test_what_no_family_can_say_is_refused_by_name(field):
    config = family_config("llama", vocab_size=99, **UNSAYABLE[field])
    with pytest.raises(ConfigError, match=field):
        config_to_huggingface(config)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_published_as_its_family(name):
    config, family = TransformerConfig.from_dict(preset(name)), PRESETS[name].name
    assert config_to_huggingface(config)[0] == config_to_huggingface(config, family)[0] == family


def test_a_model_that_has_become_another_does_not_keep_its_config(tmp_path):
    published = publish("llama2", tmp_path / "published")
    convert("--load", publish("qwen2.5", tmp_path / "other"), "--save", tmp_path / "ours")
    said = refused("--load", tmp_path / "ours", "--save", tmp_path / "back", "--hf-model", published)
    assert "add_qkv_bias: True here, False there" in said and "--hf-model none" in said
    said = refused("--load", tmp_path / "ours", "--save", tmp_path / "back", "--hf-model", "none", "--family", "llama")
    assert "add_qkv_bias: True here, False there" in said


# ------------------------------------------------------------------------------------------------- flags


def test_megatrons_flags(tmp_path, capsys):
    published = publish("qwen2.5", tmp_path / "published")
    line = (
        f"--model-type GPT --loader llama_mistral --saver core --checkpoint-type hf --model-size qwen2.5 "
        f"--load-dir {published} --save-dir {tmp_path / 'ours'} --tokenizer-model {published} "
        "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --bf16"
    )
    convert(*line.split())
    said = capsys.readouterr().out
    assert "--target-tensor-parallel-size changes nothing: any layout loads the checkpoint" in said
    assert open_model(tmp_path / "ours").config.params_dtype == "bf16"


FLAGS = {
    "--model-type BERT": "--model-type BERT is not supported",
    "--loader llama_mistral --from ours": "mean different things",
    "--max-shard-size 5XB": "is no size",
    "--max-shard-sise 5GB": "did you mean `--max-shard-size`?",
    "--tokenizer-model /elsewhere": "lies outside of --load",
    "--ckpt-step 3": "has no steps",
    "--from ours": "no complete checkpoint",
    "--from torch_dist": "no checkpoint of Megatron's",
    "--true-vocab-size 90": "--true-vocab-size means nothing from hf to ours",
    "--family llama": "--family means nothing from hf to ours",
    "--to torch_dist --max-shard-size 5MB": "--max-shard-size means nothing from hf to torch_dist",
    "--hf-model none": "--hf-model with --to ours",
}


@pytest.mark.parametrize("line", FLAGS)
def test_flags_that_are_refused(line, tmp_path):
    published = publish("llama2", tmp_path / "published")
    assert FLAGS[line] in refused("--load", published, "--save", tmp_path / "ours", *line.split())


def test_a_folder_with_nothing_in_it(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "neither" in refused("--load", tmp_path / "empty", "--save", tmp_path / "ours")


def test_a_dry_run_says_what_each_tensor_is_made_of(tmp_path, capsys):
    convert("--load", publish("mixtral", tmp_path / "published"), "--dry-run")
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    model = open_model(tmp_path / "published")
    assert lines.keys() == model.weights.tensors.keys()
    layer, theirs = "decoder.layers.1.", "model.layers.1."
    assert lines[f"{layer}self_attention.linear_qkv.weight"] == (
        f"float32 [128, 64]  <-  {theirs}self_attn.q_proj.weight rows 0:32, 32:64 + "
        f"{theirs}self_attn.k_proj.weight rows 0:16, 16:32 + {theirs}self_attn.v_proj.weight rows 0:16, 16:32"
    )
    assert lines[f"{layer}mlp.experts.weight1"] == (
        f"float32 [8, 192, 64]  <-  {theirs}block_sparse_moe.experts.0.w1.weight + "
        f"{theirs}block_sparse_moe.experts.0.w3.weight + {theirs}block_sparse_moe.experts.1.w1.weight + "
        f"{theirs}block_sparse_moe.experts.1.w3.weight + 12 more"
    )
    assert not (tmp_path / "ours").exists()


def test_a_source_that_is_not_like_its_configuration():
    config = family_config("llama", vocab_size=99, num_layers=1)
    state = {name: torch.zeros(d.shape, dtype=d.dtype) for name, d in logical_tensors(config).items()}
    state["surprise"] = state.pop("output_layer.weight")
    with pytest.raises(CheckpointError) as error:
        checked(Model("ours", config, InMemory(state), None), None)
    assert "missing output_layer.weight" in str(error.value) and "surprise: the configuration has none" in str(
        error.value
    )
