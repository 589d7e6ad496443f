"""docs/checkpoints.md: its commands run from beginning to end at toy size, and what it says of flags is so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minimegatron.commands import convert
from minimegatron.data.corpus import prepare_corpus
from minimegatron.errors import ConfigError
from tests.checkpoint.test_convert import change_config, publish, tensors_of
from tests.models.test_huggingface import SIZES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/checkpoints.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CONVERTED = re.findall(r"minimegatron convert (--[^`\n]*)", TEXT.replace("\\\n", ""))


def test_every_block_is_shell():
    assert len(BLOCKS) == 5
    for block in BLOCKS:
        done = subprocess.run(("bash", "-n"), input=block, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr


def test_every_conversion_has_flags_that_exist():
    assert len(CONVERTED) >= 4
    for line in CONVERTED:
        convert.parse(shlex.split(line))


def test_every_flag_of_megatrons_tool_that_is_understood_is_in_the_table():
    table = set(re.findall(r"--[a-z-]+", "".join(line for line in TEXT.splitlines() if line.startswith("|"))))
    assert {*convert.ALREADY, "--loader", "--saver", "--true-vocab-size", "--tokenizer-model"} - {
        "--megatron-path"
    } <= table
    for name in (*convert.LOADERS, *convert.SAVERS):
        assert name in TEXT or name == "llama2_hf", name


def test_the_message_about_the_pad_token_is_the_one_that_is_printed(tmp_path):
    pytest.importorskip("transformers")
    published = publish("qwen2.5", tmp_path / "published")
    change_config(published, pad_token_id=99)
    with pytest.raises(ConfigError) as caught:
        convert.main(["--load", str(published), "--save", str(tmp_path / "ours")])
    said = str(caught.value).replace(str(published), "Qwen2.5-0.5B").replace("99", "151936").replace("98", "151935")
    assert said in TEXT


TOY = {r"--seq-length \d+": "--seq-length 32", r"--global-batch-size \d+": "--global-batch-size 2",
       r"--train-iters \d+": "--train-iters 2", r"--save-interval \d+": "--save-interval 1"}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_commands_run_one_after_the_other(docs_corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    corpus = prepare_corpus(docs_corpus, 512, "docs")
    published = tmp_path / "Qwen2.5-0.5B"
    config = transformers.Qwen2Config(**{**SIZES, "vocab_size": 520})  # as published: more rows than tokens
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(published)
    shutil.copytree(corpus.tokenizer_model, published, dirs_exist_ok=True)
    (tmp_path / "text.jsonl").write_text("".join(Path(corpus.jsonl).read_text().splitlines(keepends=True)[:40]))
    commands = "".join(BLOCKS)
    for long, short in TOY.items():
        commands, times = re.subn(long, short, commands)
        assert times == 1, long
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        ["bash", "-euo", "pipefail"], input=commands, text=True, cwd=tmp_path, env=env, check=True, timeout=800
    )
    before, after = tensors_of(published), tensors_of(tmp_path / "runs" / "qwen" / "hf")
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    assert any(not after[name].equal(before[name]) for name in before), "training has moved nothing"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "qwen" / "hf")
