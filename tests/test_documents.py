"""README.md, CONTRIBUTING.md and docs/: links lead somewhere, files exist, and commands are understood.

The commands of docs/checkpoints.md also run from beginning to end, at toy size, under `--thorough`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimegatron.cli import COMMANDS
from minimegatron.commands import convert
from minimegatron.data.corpus import prepare_corpus
from minimegatron.training.arguments import parse_args

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
}
NAMES = sorted(set(DOCUMENTS) - {"CHANGELOG.md"})  # which speaks of what there was


def blocks(name: str, language: str = "bash") -> list[str]:
    return re.findall(rf"^```(?:{language})\n(.*?)^```", DOCUMENTS[name], re.MULTILINE | re.DOTALL)


def commands(name: str, command: str) -> Iterator[str]:
    """The arguments of every call of `minimegatron COMMAND` in a document, in blocks and between backticks."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", DOCUMENTS[name], flags=re.MULTILINE | re.DOTALL))
    for code in (*blocks(name, "bash|console"), *inline):
        yield from re.findall(rf"minimegatron {command} (-.*)", code.replace("\\\n", " "))


def anchors(text: str) -> set[str]:
    """The names under which GitHub reaches the headings of a Markdown file, and the places that `<a id=…>` marks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    marks, headings = re.findall(r'<a id="([^"]+)"></a>', prose), re.findall(r"^#+ +(?:<.*?>)*(.*?) *$", prose, re.M)
    return {*marks, *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name: str) -> None:
    broken = []
    for pair in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", DOCUMENTS[name]):
        target, _, anchor = (pair[0] or pair[1]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / name).parent / target if target else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(pair)
    assert not broken


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    """`layers/linear` is minimegatron/layers/linear.py; a path that begins at the root is itself."""
    rooms = "|".join(p.name for p in (ROOT / "minimegatron").iterdir() if (p / "__init__.py").is_file())
    modules = re.findall(rf"(?<![\w./-])((?:{rooms})/[a-z_0-9]+)(?![\w/])", DOCUMENTS[name])
    paths = re.findall(r"`((?:tests|labkit|course|minimegatron|examples|benchmarks)/[\w./]+)`", DOCUMENTS[name])
    missing = {module for module in modules if not list((ROOT / "minimegatron").glob(f"{module}*"))}
    # NN stands for the number of any lab
    missing |= {path for path in paths if not list(ROOT.glob(re.sub("NN(_name)?", "*", path.rstrip("/"))))}
    assert not missing, sorted(missing)


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_flags_exist(name: str) -> None:
    for block in blocks(name):
        done = subprocess.run(("bash", "-n"), input=block, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
    for line in commands(name, "train"):
        if name == "docs/checkpoints.md":  # they read what the commands before them wrote, and run below
            continue
        parallel = re.findall(r"--(?:tensor|pipeline)-model-parallel-size (\d+)", line)
        parse_args(shlex.split(line), 16 if "--global-batch-size 64" in line else 2 * len(parallel) or 1)
    for line in commands(name, "convert"):
        convert.parse(shlex.split(line))
    code = " ".join(blocks(name, "bash|console"))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^(?:\$ )?make ([a-z]+)", code, re.MULTILINE)) <= targets
    assert set(re.findall(r"(?<![\w./-])minimegatron ([a-z-]+)", code)) <= COMMANDS.keys()


def test_there_is_something_to_check() -> None:
    assert sum(len(list(commands(name, "train"))) for name in NAMES) >= 8
    assert sum(len(list(commands(name, "convert"))) for name in NAMES) >= 4


def test_the_tree_of_the_readme_is_the_tree_of_the_repository() -> None:
    block = re.search(r"```text\n(minimegatron/\n.*?)```", DOCUMENTS["README.md"], re.S)
    assert block, "the README has a commented tree that begins with minimegatron/"
    tree, parents = dict[str, str](), list[str]()
    for line in block[1].splitlines():
        entry = re.match(r"( *)([\w./-]+)(?: +(.*))?$", line)
        assert entry, line
        parents[len(entry[1]) // 2 :] = [entry[2]]
        tree["".join(parents)] = entry[3] or ""
    package = ROOT / "minimegatron"
    rooms = {f"minimegatron/{p.parent.name}/" for p in package.glob("*/__init__.py")}
    modules = {f"minimegatron/{p.name}" for p in package.glob("*.py") if not p.name.startswith("__")}
    assert not (rooms | modules) - set(tree), "in the repository, not in the README"
    assert not [name for name in tree if not (ROOT / name).exists()], "in the README, not in the repository"
    assert all(tree[name] for name in rooms | modules), "every package has its comment"


def test_the_length_of_the_spine_is_the_one_that_is_printed() -> None:
    spine = DOCUMENTS["README.md"].split("\n## The spine\n")[1].split("\n## ")[0]
    files = re.findall(r"\]\(([\w/]+\.py)\)", spine)
    assert files[0] == "examples/simple_loop.py" and len(files) == len(set(files))
    length = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    (printed,) = re.findall(r"about ([\d,]+) lines", spine)
    assert int(printed.replace(",", "")) == pytest.approx(length, rel=0.1)


TOY = {r"--seq-length \d+": "--seq-length 32", r"--global-batch-size \d+": "--global-batch-size 2",
       r"--train-iters \d+": "--train-iters 2", r"--save-interval \d+": "--save-interval 1"}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_commands_about_checkpoints_run_one_after_the_other(docs_corpus: Path, tmp_path: Path) -> None:
    from tests.checkpoint.test_convert import tensors_of
    from tests.models.test_huggingface import SIZES

    transformers = pytest.importorskip("transformers")
    corpus = prepare_corpus(docs_corpus, 512, "docs")
    published = tmp_path / "Qwen2.5-0.5B"
    config = transformers.Qwen2Config(**{**SIZES, "vocab_size": 520})  # as published: more rows than tokens
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(published)
    shutil.copytree(corpus.tokenizer_model, published, dirs_exist_ok=True)
    (tmp_path / "text.jsonl").write_text("".join(Path(corpus.jsonl).read_text().splitlines(keepends=True)[:40]))
    script = "".join(blocks("docs/checkpoints.md"))
    for long, short in TOY.items():
        script, times = re.subn(long, short, script)
        assert times == 1, long
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        ["bash", "-euo", "pipefail"], input=script, text=True, cwd=tmp_path, env=env, check=True, timeout=800
    )
    before, after = tensors_of(published), tensors_of(tmp_path / "runs" / "qwen" / "hf")
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    assert any(not after[name].equal(before[name]) for name in before), "training has moved nothing"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "qwen" / "hf")
