"""The standard library as a corpus: deterministic, without tests, prepared once."""

import json
import os
import subprocess
import sys

import pytest

from minimegatron.data.corpus import docstrings, documents, prepare_corpus, write_corpus_jsonl
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import ConfigError

PREPARE = """
import sys
from minimegatron.data import corpus
real = corpus.documents
corpus.documents = lambda kind: [item for i, item in enumerate(real("code")) if i % 40 == 0]
found = corpus.prepare_corpus(sys.argv[1], 400, "code")
print(found.data_path, end="")
"""


def test_docstrings_in_the_order_of_the_file():
    body = '"""M."""\nclass A:\n    """C."""\n    def f(self):\n        """F."""\n\n'
    source = body + 'async def g():\n    """G.\n\n    more"""\nx = 1'
    assert docstrings(source) == "M.\n\nC.\n\nF.\n\nG.\n\nmore"


def test_code_is_the_library_in_path_order_without_tests():
    found = list(documents("code"))
    names = [name for name, _ in found]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert sum(len(text) for _, text in found) > 5_000_000
    assert not any("sysconfigdata" in name for name in names), "machine-specific"
    with pytest.raises(ConfigError, match="docs, code, both"):
        next(documents("prose"))


def test_jsonl_repeats(tmp_path):
    count = write_corpus_jsonl(tmp_path / "a.jsonl", "code")
    write_corpus_jsonl(tmp_path / "b.jsonl", "code")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == count and set(json.loads(lines[0])) == {"text", "path"}


def test_three_ranks_prepare_once(tmp_path):
    """A fortieth of the corpus, so that it takes a moment only."""
    command = [sys.executable, "-c", PREPARE, str(tmp_path)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 3 and len(paths) == 1
    (path,) = paths
    home = os.path.dirname(path)
    assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(home), os.path.basename(home) + ".lock"])
    tokenizer = HuggingFaceTokenizer(os.path.join(home, "tokenizer"))
    dataset = IndexedDataset(path, vocab_size=tokenizer.vocab_size)
    assert dataset.sidecar["tokenizer"] == tokenizer.identity
    with open(os.path.join(home, "corpus.jsonl"), encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    assert len(texts) == len(dataset) > 10
    for i in (0, len(texts) - 1):
        ids = dataset[i].tolist()
        assert ids[-1] == tokenizer.eod and tokenizer.detokenize(ids) == texts[i]
    before = os.stat(path + ".bin").st_mtime_ns
    again = prepare_corpus(tmp_path, 400, "code")
    assert again.data_path == path and os.stat(path + ".bin").st_mtime_ns == before
    assert again.tokenizer().identity == tokenizer.identity
