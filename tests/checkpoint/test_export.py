"""What is published from here, as transformers alone reads it: logits, configuration, tokenizer, template, stops."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from minimegatron.checkpoint import companions
from minimegatron.checkpoint.conversion import logical_tensors, open_model, target
from minimegatron.checkpoint.hf_folder import write_published
from minimegatron.checkpoint.sources import InMemory
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.checkpoint import main as verify
from minimegatron.commands.convert import main
from minimegatron.config import TransformerConfig
from minimegatron.data.tokenizer import ByteTokenizer, GPT2BPETokenizer
from minimegatron.data.tokenizer_training import made_files
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.inference.loading import load
from minimegatron.models.families import FAMILIES, family_config
from minimegatron.training.arguments import parse_args
from tests.checkpoint.test_continued import LINE
from tests.checkpoint.test_convert import change_config, convert, publish
from tests.mock_data import small_trainer
from tests.models.test_huggingface_config import ENCODERS, TINY
from tests.thorough import THOROUGH, mostly_thorough

TOKENS = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 128 --mock-data"
L = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
L += "--untie-embeddings-and-output-weights"
SHORT = "--rope-scaling-original-max-position-embeddings 8"
E, SHARED = f"{L} --num-experts 4", "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --add-qkv-bias"
# What flags make, and the family that transformers computes it by; or the field that no family has.
KINDS = {
    L: "llama",
    f"{L} --rotary-percent 0.5": "rotary_percent: 0.5 here, 1.0 there",
    f"{L} --rotary-percent 0.5 --rope-scaling-type linear --rope-scaling-factor 4": "rotary_percent: 0.5 here",
    f"{L} --rotary-percent 0.5 --add-qkv-bias": "rotary_percent: 0.5 here",
    f"{L} --rotary-percent 0.5 --qk-layernorm": "rotary_percent: 0.5 here",
    f"{E} --rotary-percent 0.5": "rotary_percent: 0.5 here",
    f"{L} --add-qkv-bias": "qwen2",
    f"{L} --qk-layernorm": "qwen3",
    f"{L} --sliding-window 8": "mistral",
    f"{L} --add-qkv-bias --sliding-window 8": "qwen2",
    f"{L} --qk-layernorm --sliding-window 8": "qwen3",
    L.replace("--disable-bias-linear ", ""): "llama",
    L.replace("--swiglu", "--activation geglu"): "llama",
    f"{L} --kv-channels 8": "llama",
    L.replace("--untie-embeddings-and-output-weights", ""): "llama",
    f"{L} --use-rope-scaling {SHORT}": "llama",
    f"{L} --rope-scaling-type yarn --rope-scaling-factor 4 {SHORT}": "llama",
    f"{L} --rope-scaling-type linear --rope-scaling-factor 4": "llama",
    f"{L} --norm-epsilon 0.1": "llama",
    f"{L} --rotary-base 77": "llama",
    "": "gpt2",
    "--activation gelu": "gpt2",
    "--activation relu": "gpt2",
    "--untie-embeddings-and-output-weights": "gpt2",
    "--kv-channels 8": "kv_channels",
    "--num-query-groups 1": "num_query_groups",
    f"{L} --rotary-interleaved": "rotary_interleaved",
    f"{L} --layernorm-zero-centered-gamma": "layernorm_zero_centered_gamma",
    L.replace("RMSNorm", "LayerNorm"): "normalization",
    f"{E} --ffn-hidden-size 48": "mixtral",
    f"{E} --sliding-window 8": "mixtral",
    f"{E} --moe-router-pre-softmax --qk-layernorm --moe-ffn-hidden-size 24": "qwen3_moe",
    f"{E} --qk-layernorm --sliding-window 8": "qwen3_moe",
    f"{E} --qk-layernorm --moe-layer-freq ([0]*1+[1]*1)": "qwen3_moe",
    f"{E} --moe-router-pre-softmax": "moe_router_pre_softmax",
    f"{E} {SHARED} --moe-router-pre-softmax --moe-ffn-hidden-size 24": "qwen2_moe",
    f"{E} {SHARED} --sliding-window 8": "qwen2_moe",
    f"{E} --moe-router-score-function sigmoid": "moe_router_score_function",
    f"{E} --moe-router-topk-scaling-factor 2.5": "moe_router_topk_scaling_factor",
    f"{E} --moe-router-topk 1 --moe-router-pre-softmax --qk-layernorm": "qwen3_moe",
}


def written(config: TransformerConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Publish random weights; returns them."""
    drawn = torch.Generator().manual_seed(0)
    state = {
        name: 0.2 * torch.randn(d.shape, generator=drawn) + (1 if name.endswith("norm.weight") else 0)
        for name, d in logical_tensors(config).items()
    }
    tensors, keys = target("hf", config, InMemory(state), None, None)
    write_published(tensors, keys, folder, 10**9)
    return state


def theirs(folder: Path) -> tuple[Any, torch.Tensor]:
    """transformers' model of a folder, and its logits."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model, model(TOKENS).logits


def ours(folder: Path) -> torch.Tensor:
    """Our logits of a folder."""
    with torch.no_grad():
        return load(open_model(folder), Mesh.serial(), "fp32").full_logits(TOKENS)


FEW = ("", f"{L} --rotary-percent 0.5", f"{L} --sliding-window 8", f"{E} --qk-layernorm --sliding-window 8")


@pytest.mark.parametrize(("line", "expected"), mostly_thorough(list(KINDS.items()), lambda case: case[0] in FEW))
def test_transformers_computes_what_was_exported_or_nothing_was(tmp_path, line, expected):
    """The model itself, and what our own reader makes of the folder, are both compared with transformers."""
    run = parse_args(shlex.split(f"{SMALL} {line}"), 1)
    config = run.trained_model(128)
    if expected not in TINY:
        with pytest.raises(ConfigError, match=expected) as error:
            written(config, tmp_path / "hf")
        assert "--to ours" in error.value.fix and len(str(error.value).splitlines()) <= 6
        return
    state = written(config, tmp_path / "hf")
    model, logits = theirs(tmp_path / "hf")
    assert model.config.model_type == expected and logits.abs().max() > 1
    assert (ours(tmp_path / "hf") - logits).abs().max() < 2e-5 * logits.abs().max()
    same = open_model(tmp_path / "hf").weights
    assert all(torch.equal(same.read(name), tensor) for name, tensor in state.items())
    if config.rotates:  # no default of ours, and none of theirs, where something was chosen
        assert model.config.max_position_embeddings == 32
    assert model.config.initializer_range == run.model.init_method_std


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ("--seq-length 2048", 2048),
        ("--seq-length 16", 16),
        ("--seq-length 16 --max-position-embeddings 1024", 1024),
        ("--seq-length 2048 --max-position-embeddings 64", 2048),
        ("--seq-length 16 --max-position-embeddings 4096", 4096),
    ],
)
def test_positions_reach_as_far_as_was_trained_or_chosen(flags, longest):
    run = parse_args(shlex.split(f"{SMALL} {L} {flags}"), 1)
    assert run.trained_model(128).max_position_embeddings == longest
    learned = parse_args(shlex.split(f"{SMALL} --seq-length 16"), 1)  # rows of a matrix
    assert learned.trained_model(128).max_position_embeddings == 1024


# ------------------------------------------------------------------------------------- tokenizer, template, stop tokens

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}<e>{% endfor %}"
GENERATION = {"eos_token_id": [2, 5], "bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_k": 7}


def write_tokenizer(folder: Path, eos: str = "<e>", jinja: bool = False) -> Path:
    """A tokenizer of 60 words with a chat template, in one of the two places that templates have."""
    words = {"<pad>": 0, "<s>": 1, "<e>": 2, "<u>": 3} | {f"w{i}": i for i in range(4, 60)}
    fast = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<pad>", "<s>", "<e>", "<u>"])
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | ({} if jinja else {"chat_template": TEMPLATE})))
    if jinja:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool.jinja").write_text("tool " + TEMPLATE)
    return folder


def trained(line: str) -> tuple[Any, torch.Tensor]:
    """One step of a run; its configuration, and the logits of what it has trained."""
    trainer = small_trainer(parse_args(shlex.split(f"{LINE} --train-iters 1 --lr-decay-iters 1 {line}"), 1), quiet=True)
    trainer.train()
    trainer.close()
    with torch.no_grad():
        return trainer.run, trainer.model.eval().module.full_logits(TOKENS)  # type: ignore[operator]


def check_published(folder: Path, tokenizer: Path, logits: torch.Tensor) -> Any:
    """transformers alone computes these logits, and has this tokenizer with its templates; returns its model."""
    import transformers

    model, found = theirs(folder)
    reader: Any = transformers.AutoTokenizer
    if model.config.model_type == "qwen2":  # whose tokenizer is Qwen2's for `AutoTokenizer`, whatever lies there
        reader = transformers.PreTrainedTokenizerFast
    assert (found - logits).abs().max() < 2e-5 * logits.abs().max()
    read, wanted = (reader.from_pretrained(path) for path in (folder, tokenizer))
    text = "w7 w9 <e> w11"
    assert read(text)["input_ids"] == wanted(text)["input_ids"] and read.get_vocab() == wanted.get_vocab()
    assert read.chat_template == wanted.chat_template is not None
    assert (read.eos_token_id, read.bos_token_id, read.pad_token_id) == (
        wanted.eos_token_id, wanted.bos_token_id, wanted.pad_token_id
    )  # fmt: skip
    said = [{"role": "user", "content": "w5"}]
    assert read.apply_chat_template(said, tokenize=False) == wanted.apply_chat_template(said, tokenize=False)
    return model


def scratch_line(family: str, folder: Path) -> str:
    """Flags of a tiny model of a family."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96}
    if family == "deepseek_v3":
        sizes |= {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
        sizes |= {"moe_layer_freq": "([0]*1+[1]*1)", "moe_router_topk_scaling_factor": 2.5}
    if FAMILIES[family].has("moe"):
        sizes |= {"num_experts": 4, "moe_router_topk": 2}
    if FAMILIES[family].has("mamba"):
        pattern = "M*E-" if FAMILIES[family].has("moe") else "MM"
        sizes |= {"hybrid_override_pattern": pattern, "num_layers": len(pattern), "mamba_head_dim": 16}
    if family == "nemotron_h":
        sizes |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if family == "qwen3_next":
        sizes |= {"linear_attention_freq": "2", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if family in ("qwen2_moe", "deepseek_v3", "nemotron_h", "qwen3_next"):
        sizes |= {"moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 48}
    model = family_config(family, **sizes).to_dict()
    for name in ("vocab_size", "max_position_embeddings") if family != "gpt2" else ("vocab_size",):
        del model[name]  # not chosen
    file = folder / "model.json"
    file.write_text(json.dumps({"model": model}))
    return f"--config {file}"


ORDINARY = ("llama", "qwen3_moe")
DECODERS = [family for family in TINY if family not in ENCODERS]


@pytest.mark.parametrize("family", mostly_thorough(DECODERS, lambda family: family in ORDINARY))
def test_a_run_from_scratch_is_published_with_its_tokenizer(tmp_path, capsys, family):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", jinja=family == "llama")
    given = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    run, logits = trained(f"{scratch_line(family, tmp_path)} {given} --save {tmp_path / 'run'}")
    convert("--load", tmp_path / "run", "--save", tmp_path / "hf", "--to", "hf")
    model = check_published(tmp_path / "hf", tokenizer, logits)
    assert model.config.model_type == family and model.config.vocab_size == 60
    for said in (model.config, model.generation_config):
        assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == (1, 2, 0)
    longest = getattr(model.config, "max_position_embeddings", run.data.seq_length)
    assert longest == (1024 if family == "gpt2" else run.data.seq_length)
    assert ("PreTrainedTokenizerFast" in capsys.readouterr().out) == (family == "qwen2")
    if family == "deepseek_v3":  # what others than transformers ask for
        assert (model.config.scoring_func, model.config.topk_method) == ("sigmoid", "noaux_tc")
        assert model.config.num_mtp_layers == 0


@pytest.mark.parametrize("family", mostly_thorough(DECODERS, lambda family: family in ORDINARY))
def test_a_run_from_a_folder_is_published_as_it_began(tmp_path, family):
    """Through two runs, the second from the checkpoints of the first, and no `--hf-model`."""
    published = write_tokenizer(publish(TINY[family], tmp_path / "published"))
    (published / "generation_config.json").write_text(json.dumps(GENERATION))
    change_config(published, eos_token_id=[2, 5], bos_token_id=1, id2label={"0": "kept"})
    trained(f"--load {published} --save {tmp_path / 'first'}")
    _, logits = trained(f"--load {tmp_path / 'first'} --use-checkpoint-args --finetune --save {tmp_path / 'second'}")
    convert("--load", tmp_path / "second", "--save", tmp_path / "hf")
    model = check_published(tmp_path / "hf", published, logits)
    assert companions.files_in(tmp_path / "hf").keys() == companions.files_in(published).keys()
    for name, content in companions.files_in(published).items():
        if name != companions.CONFIG:
            assert (tmp_path / "hf" / name).read_bytes() == content, name
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (published, tmp_path / "hf"))
    assert {**before, "torch_dtype": "float32"} == after
    assert model.generation_config.to_diff_dict().items() >= {**GENERATION, "eos_token_id": [2, 5]}.items()
    convert("--load", tmp_path / "second", "--save", tmp_path / "own", "--hf-model", "none")  # a config.json of ours
    own = check_published(tmp_path / "own", published, logits)
    assert own.config.eos_token_id == [2, 5] and own.generation_config.eos_token_id == [2, 5]


def test_another_tokenizer_than_the_folders_is_published_and_its_end_of_text_stops(tmp_path):
    """`<u>` has ended the texts of the run, `<e>` the answers of the folder's model: both end one."""
    published = write_tokenizer(publish("llama2", tmp_path / "published"))
    (published / "generation_config.json").write_text(json.dumps(GENERATION))
    other = write_tokenizer(tmp_path / "other", eos="<u>")
    given = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {other}"
    _, logits = trained(f"--load {published} {given} --seq-length 300 --save {tmp_path / 'run'}")
    convert("--load", tmp_path / "run", "--save", tmp_path / "hf")
    model = check_published(tmp_path / "hf", other, logits)
    assert model.generation_config.eos_token_id == [2, 5, 3] and model.generation_config.temperature == 0.6
    assert model.config.max_position_embeddings == 300  # of 256 in the folder: the run has trained longer ones


def test_what_lies_beside_the_weights_is_not_lost_or_changed_in_silence(tmp_path, capsys):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    given = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    trained(f"{scratch_line('llama', tmp_path)} {given} --save {tmp_path / 'run'}")
    beside = tmp_path / "run" / companions.FOLDER
    words = ["--load", str(tmp_path / "run"), "--to", "hf", "--save"]
    (beside / "tokenizer.json").write_text("{}")
    for command in (lambda: main([*words, str(tmp_path / "changed")]), lambda: verify(["verify", str(beside.parent)])):
        with pytest.raises(CheckpointError, match="have changed"):
            command()
    beside.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="are missing") as error:
        main([*words, str(tmp_path / "lost")])
    assert "--hf-model" in error.value.fix
    convert(*words, tmp_path / "named", "--hf-model", tokenizer)  # another folder's, by name
    assert "No token ends its texts" in capsys.readouterr().out


def test_a_resumed_run_keeps_what_is_there_and_an_old_one_gets_its_tokenizer(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    line = f"{scratch_line('llama', tmp_path)} --save {tmp_path} --tokenizer-type HuggingFaceTokenizer "
    line += f"--tokenizer-model {tokenizer} --train-iters 2 --lr-decay-iters 2"
    trained(f"{line} --exit-interval 1")
    beside = tmp_path / companions.FOLDER
    made = companions.files_in(beside)
    for file in beside.iterdir():  # as before there was such a folder
        file.unlink()
    beside.rmdir()
    trained(f"{line} --load {tmp_path}")
    assert companions.files_in(beside) == made
    stamp = beside.stat().st_mtime_ns
    companions.keep(tmp_path, made)
    assert beside.stat().st_mtime_ns == stamp, "equal files are not written again"


@pytest.mark.parametrize("kind", ["bytes", "gpt2"])
def test_a_tokenizer_without_a_folder_becomes_one_that_transformers_reads(tmp_path, kind):
    import transformers

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps(letters | {"th": 256, "the": 257, "<|endoftext|>": 258}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    mine: Any = ByteTokenizer()
    if kind == "gpt2":
        mine = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    for name, content in made_files(mine).items():
        (tmp_path / name).write_bytes(content)
    read = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("the other  thing\n\t1234", "".join(map(chr, range(256))), "Gödel 證明 🙂 \x00"):
        assert read(text)["input_ids"] == mine.tokenize(text)
        assert read.decode(mine.tokenize(text), clean_up_tokenization_spaces=False) == text
    assert read.eos_token_id == mine.eod and len(read) == mine.vocab_size
    assert read.pad_token_id == (mine.pad if mine.pad >= 0 else None)


@THOROUGH
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_transformers_takes_the_dtype_of_the_files(tmp_path, dtype):
    config = family_config("llama", hidden_size=64, num_layers=1, vocab_size=60, params_dtype=dtype)
    state = {name: torch.ones(d.shape, dtype=d.dtype) for name, d in logical_tensors(config).items()}
    tensors, keys = target("hf", config, InMemory(state), None, None)
    write_published(tensors, keys, tmp_path / "hf", 10**9)
    assert theirs(tmp_path / "hf")[0].dtype == config.dtype
