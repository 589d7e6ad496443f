"""A corpus on every machine without a download: the sources and docstrings of Python's own standard library.

| kind   | documents                                      | size   | what a small model learns from it        |
|--------|------------------------------------------------|--------|------------------------------------------|
| `code` | one a source file                              | 12 MB  | indentation, `def`, brackets that match  |
| `docs` | one a file: its docstrings, in order           | 1.5 MB | technical English                        |
| `both` | the two, file by file                          |        |                                          |

Tests are left out, and whatever is not the standard library itself. The order is that of the paths, so the same Python
gives the same corpus, the same tokenizer and the same `.bin`; another version of Python gives another one.

`prepare_corpus` goes the way a user's text goes: JSONL, a byte-level BPE trained on it, `preprocess`. It also prepares
the beginning of a data set of the Hugging Face hub, or of a folder, under its name there (`hub`).
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from minimegatron.bars import tqdm
from minimegatron.data import hub
from minimegatron.data.preprocess import preprocess
from minimegatron.data.publish import Draft, build_once
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.data.tokenizer_training import train_bpe
from minimegatron.errors import ConfigError, DataError

KINDS = ("docs", "code", "both")
TEST_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "_bundled"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        jsonl: the documents, as {"text", "path"}.
        tokenizer_model: folder of the tokenizer, for `--tokenizer-model`.
        data_path: prefix of `.bin/.idx`, for `--data-path`.
    """

    jsonl: str
    tokenizer_model: str
    data_path: str

    def tokenizer(self) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(self.tokenizer_model)


def documents(kind: str = "docs") -> Iterator[tuple[str, str]]:
    """(path below the standard library, text) of every document, in the order of the paths.

    Raises:
        ConfigError: an unknown kind.
        DataError: this Python has no sources.
    """
    if kind not in KINDS:
        raise ConfigError(f"corpus kind {kind!r}", fix=f"one of {', '.join(KINDS)}")
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = _sources(root)
    if not sources:
        raise DataError(
            "this Python comes without the sources of its standard library",
            where=str(root),
            fix="install a Python that has them, or --data-path, --mock-data",
        )
    for path in sources:
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        if kind != "docs" and text.strip():
            yield name, text
        if kind != "code" and (docs := docstrings(text)):
            yield name, docs


def _sources(root: Path) -> list[Path]:
    """The library's own files: modules that Python lists as its own, without tests."""
    found = [
        path
        for name in sorted(sys.stdlib_module_names)
        for path in ((root / f"{name}.py"), *(root / name).rglob("*.py"))
        if path.is_file() and not TEST_FOLDERS & set(path.relative_to(root).parts)
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def docstrings(source: str) -> str:
    """All docstrings of a module, in the order of the file, separated by blank lines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in _statements(ast.parse(source)) if isinstance(node, kinds)]
    return "\n\n".join(text.strip() for node in nodes if (text := ast.get_docstring(node)) and text.strip())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all statements in it, in the order of the file; expressions contain no statements."""
    yield node
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        for child in getattr(node, name, ()):
            yield from _statements(child)


def write_corpus_jsonl(path: str | os.PathLike[str], texts: Iterable[tuple[str, str]]) -> int:
    """Write (path, text) of documents as JSONL, whole or not at all; returns the number of documents."""
    count = 0
    with Draft(path) as draft:
        for name, text in texts:
            line = json.dumps({"text": text, "path": name}, ensure_ascii=False) + "\n"
            draft.write(line.encode("utf-8", "surrogatepass"))
            count += 1
        draft.publish()
    return count


def prepare_corpus(
    folder: str | os.PathLike[str],
    vocab_size: int = 4096,
    kind: str = "docs",
    key: str = "text",
    megabytes: float = 100,
    progress: bool = False,
) -> Corpus:
    """JSONL, tokenizer and `.bin/.idx` of the corpus under `folder`; made once, and reused afterwards.

    Safe when any number of processes call it at once: one builds, the others wait.

    Args:
        folder: created when missing; may also have corpora of other kinds, vocabularies and Pythons.
        vocab_size: vocabulary of the byte-level BPE.
        kind: see the table of this module; or a data set's name, `hf:...`.
        key, megabytes: of a data set, see `hub.documents`.
        progress: show bars on stderr, if that is a terminal.

    Raises:
        ConfigError: an unknown kind, or a vocabulary that is too small.
        DataError: the folder cannot be written to; the hub does not give the data set.
    """
    if kind.startswith(hub.PREFIX):
        texts = hub.documents(kind, key, megabytes)
        name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', kind)}-{key}-{megabytes:g}MB-{_identity(kind)}"
    else:
        texts, name = documents(kind), f"stdlib-{'.'.join(map(str, sys.version_info[:3]))}-{kind}"
    home = os.path.join(os.fspath(folder), f"{name}-{vocab_size}")

    def build(stage: str) -> None:
        jsonl, tokenizer_model = os.path.join(stage, "corpus.jsonl"), os.path.join(stage, "tokenizer")
        # None: on a terminal.
        write_corpus_jsonl(jsonl, tqdm(texts, f"reading {kind}", unit=" documents", disable=None if progress else True))
        with open(jsonl, encoding="utf-8") as file:
            train_bpe((json.loads(line)["text"] for line in file), vocab_size, tokenizer_model)
        arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer_model}
        preprocess([jsonl], os.path.join(stage, "corpus"), arguments, append_eod=True, progress=progress)

    build_once(home, build)
    return Corpus(*(os.path.join(home, name) for name in ("corpus.jsonl", "tokenizer", "corpus_text_document")))


def _identity(name: str) -> str:
    """Digest of a folder's files: what is prepared again when they change. The hub is asked once."""
    wanted = hub.parse(name)
    facts = [wanted.path, wanted.split]
    if wanted.is_folder:
        facts += [f"{path} {os.stat(path).st_size} {os.stat(path).st_mtime_ns}" for path in hub.files_of(name)]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=4).hexdigest()
