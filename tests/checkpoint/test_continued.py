"""A published model is continued in any layout, and what comes out is published again; what does not fit is refused."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimegatron.checkpoint.conversion import open_model
from minimegatron.checkpoint.regions import Logical
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main
from minimegatron.data.corpus import prepare_corpus
from minimegatron.errors import CheckpointError, ConfigError, MinimegatronError
from minimegatron.inference.loading import load
from minimegatron.training.arguments import parse_args
from minimegatron.training.run_state import model_tensors
from minimegatron.training.trainer import Trainer
from tests.checkpoint.test_convert import change_config, edit, publish, refused, tensors_of
from tests.mock_data import small_trainer
from tests.models.test_huggingface import SIZES
from tests.thorough import THOROUGH, mostly_thorough

LINE = (
    "--mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr-decay-iters 3 "
    "--lr 1e-3 --hidden-dropout 0 --attention-dropout 0"
)


def trainer_of(line: str, world: int = 1) -> Trainer:
    return small_trainer(parse_args(shlex.split(f"{LINE} {line}"), world), quiet=True)


def losses_of(rank: int, world: int, line: str) -> list[tuple[float, float | None]]:
    trainer = trainer_of(line, world)
    try:
        trainer.train()
    finally:
        trainer.close()
    return [(report.losses["lm loss"], report.grad_norm) for report in trainer.history]


def whole(tensor: Logical) -> torch.Tensor:
    """A logical tensor, all of which is here."""
    made = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for part in tensor.parts:
        made[tuple(slice(a, b) for a, b in part.box)] = part.data
    return made


LAYOUTS = [
    ("qwen2.5-tied-mqa", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("gpt2", 2, "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"),
    ("qwen3_moe", 2, "--expert-model-parallel-size 2"),
    ("qwen2.5-tied-mqa", 4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    ("llama2", 2, "--use-torch-fsdp2"),
    ("deepseek_v3", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("gpt_oss", 2, "--expert-model-parallel-size 2"),
    ("gpt_oss", 4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    ("gemma3", 2, "--context-parallel-size 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "layout"), mostly_thorough(LAYOUTS, [0]))
def test_a_published_model_goes_on_in_any_layout(ranks, tmp_path, name, world, layout):
    published = publish(name, tmp_path / "published")
    serial = losses_of(0, 1, f"--load {published}")
    assert serial[2][0] < serial[0][0]
    for curve in ranks(world).run(losses_of, f"--load {published} {layout}"):
        for (loss, norm), (wanted, wanted_norm) in zip(curve, serial, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5) and norm == pytest.approx(wanted_norm, rel=1e-4)


def test_weights_in_training_are_those_of_the_folder(tmp_path):
    published = publish("deepseek_v3", tmp_path / "published")
    trainer = trainer_of(f"--load {published}")
    weights = open_model(published).weights
    for name, tensor in model_tensors(trainer.model).items():
        assert torch.equal(whole(tensor), weights.read(name.removeprefix("model."))), name
    trainer.close()
    assert trainer.state.iteration == 0


@pytest.mark.slow
def test_converted_continued_and_converted_back(ranks, tmp_path):
    """Qwen2.5 at toy size: its tutorial's three commands, and transformers reads what comes out."""
    import transformers

    published = publish("qwen2.5", tmp_path / "published")
    ours, trained, back = (tmp_path / name for name in ("ours", "trained", "back"))
    convert = (
        f"--model-type GPT --loader llama_mistral --saver core --checkpoint-type hf --model-size qwen2.5 "
        f"--load-dir {published} --save-dir {ours} --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    )
    assert main(convert.split()) == 0
    layout = "--pipeline-model-parallel-size 2"
    curves = ranks(2).run(losses_of, f"--load {ours} --use-checkpoint-args --save {trained} {layout}")
    assert main(["--load", str(trained), "--save", str(back), "--hf-model", str(published)]) == 0

    direct = trainer_of(f"--load {published}")
    direct.train()
    direct.close()
    assert [report.losses["lm loss"] for report in direct.history] == pytest.approx(
        [c[0] for c in curves[-1]], rel=1e-5
    )
    before, after = tensors_of(published), tensors_of(back)
    assert before.keys() == after.keys()
    wanted = {name.removeprefix("model."): whole(t) for name, t in model_tensors(direct.model).items()}
    found = open_model(back).weights
    for name, tensor in wanted.items():
        assert (found.read(name) - tensor).abs().max() <= 1e-5, name
    assert any((after[name] - before[name]).abs().max() > 1e-3 for name in before), "training has moved nothing"

    tokens = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager")
    with torch.no_grad():
        logits = direct.model.eval().module.full_logits(tokens)  # type: ignore[operator]
        assert (model(tokens).logits - logits).abs().max() <= 2e-4  # of weights that are 1e-5 apart


def test_what_a_folder_says_is_not_what_a_flag_says(tmp_path, monkeypatch):
    published = publish("llama2", tmp_path / "published")
    with pytest.raises(CheckpointError, match="rotary_base: 500.0 here, 10000.0 there"):
        trainer_of(f"--load {published} --rotary-base 500")
    with pytest.raises(ConfigError, match="it has no steps"):
        trainer_of(f"--load {published} --ckpt-step 3")
    with pytest.raises(ConfigError, match="checkpoints go elsewhere"):
        trainer_of(f"--load {published} --save {published}")
    monkeypatch.chdir(published)
    trainer_of("--load .").close()  # saves nothing
    change_config(published, pad_token_id=99)
    with pytest.raises(ConfigError, match="set pad_token_id to an id that the model has"):
        trainer_of(f"--load {published}")


def test_a_checkpoint_says_what_the_model_is_where_it_is_asked(tmp_path):
    assert main(["--load", str(publish("gpt2", tmp_path / "published")), "--save", str(tmp_path / "ours")]) == 0
    with pytest.raises(CheckpointError, match="the checkpoint is of another model"):
        trainer_of(f"--load {tmp_path / 'ours'} --vocab-size 99")
    trainer = trainer_of(f"--load {tmp_path / 'ours'} --use-checkpoint-args")
    trainer.close()
    assert trainer.run.model.position_embedding_type == "learned_absolute"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        parse_args(shlex.split(f"{LINE} --load {tmp_path} --use-checkpoint-args"))


def test_weights_are_rounded_to_the_runs_dtype_and_it_is_said(tmp_path, capsys):
    published = publish("llama2", tmp_path / "published")
    run = parse_args(shlex.split(f"{LINE} --load {published} --bf16"))
    trainer = small_trainer(run)
    trainer.close()
    assert f"loaded the llama model in {published}, fp32 in the files, bf16 here" in capsys.readouterr().out
    weights: Any = open_model(published).weights
    for name, tensor in model_tensors(trainer.model).items():
        assert torch.equal(whole(tensor), weights.read(name.removeprefix("model.")).bfloat16())


def test_the_path_of_a_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match="model_type 'clip' is not supported"):
        parse_args(shlex.split(f"{LINE} --load {tmp_path}"))


LARGER: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "inner width": ({"intermediate_size": 80}, {}, r"linear_fc[12].weight has shape .*96"),
    "norm of two dims": ({}, {"model.norm.weight": (1, 64)}, r"final_layernorm.weight has shape \(1, 64\)"),
    "a word more": ({"vocab_size": 100}, {}, r"word_embeddings.weight has shape \(99, 64\), .* it is \(100, 64\)"),
}


@pytest.mark.parametrize("what", LARGER)
def test_a_tensor_that_is_larger_than_the_configuration_says_is_read_by_no_command(tmp_path, what):
    config, tensors, said = LARGER[what]
    folder = publish("llama2", tmp_path / "published")
    edit(folder, **{name: torch.ones(shape) for name, shape in tensors.items()})
    change_config(folder, **config)

    def generates() -> None:
        load(open_model(folder), Mesh.serial(), "fp32")

    def trains() -> None:
        trainer_of(f"--load {folder}")

    for command in (generates, trains):
        with pytest.raises(MinimegatronError, match=said) as error:
            command()
        assert error.value.exit_code == 3 and error.value.fix and len(str(error.value).splitlines()) <= 6
    refused("--load", folder, "--save", tmp_path / "ours")


def test_what_fits_is_read_whole(tmp_path):
    folder = publish("llama2", tmp_path / "published")
    model = load(open_model(folder), Mesh.serial(), "fp32")
    theirs = load_file(folder / "model.safetensors")
    assert torch.equal(model.output_layer.weight[:99], theirs["lm_head.weight"])
    assert not model.output_layer.weight[99:].any(), "padding of the vocabulary"


@THOROUGH
def test_the_example_does_its_four_steps(docs_corpus, tmp_path):
    import transformers

    corpus = prepare_corpus(docs_corpus, 512, "docs")
    config = transformers.Qwen2Config(**{**SIZES, "vocab_size": 520})  # as published: more rows than tokens
    torch.manual_seed(0)
    published = tmp_path / "published"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(published)
    shutil.copytree(corpus.tokenizer_model, published, dirs_exist_ok=True)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(Path(corpus.jsonl).read_text().splitlines(keepends=True)[:40]))
    root = Path(__file__).parents[2]
    sizes = {"NPROC": "2", "TP": "2", "ITERS": "2", "SEQ": "32", "BATCH": "2", "PYTHONPATH": str(root)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = ["bash", root / "examples" / "continue_qwen.sh", published, text, tmp_path / "out"]
    subprocess.run(line, check=True, timeout=300, env={**os.environ, **sizes, "PATH": path})
    before, after = tensors_of(published), tensors_of(tmp_path / "out" / "hf")
    assert before.keys() == after.keys() and all(after[k].shape == before[k].shape for k in before)
    assert any(not torch.equal(after[k], before[k]) for k in before)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "hf")
