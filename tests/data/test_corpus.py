"""The standard library as a corpus: deterministic, without tests, prepared once."""

import json
import os

import pytest

from minimegatron.data.corpus import docstrings, documents, prepare_corpus, write_corpus_jsonl
from minimegatron.data.indexed import IndexedDataset
from minimegatron.errors import ConfigError


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
    count = write_corpus_jsonl(tmp_path / "a.jsonl", documents("code"))
    write_corpus_jsonl(tmp_path / "b.jsonl", documents("code"))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == count and set(json.loads(lines[0])) == {"text", "path"}


def test_a_corpus_is_prepared_once(tmp_path, monkeypatch):
    """A fortieth of the library."""
    few = list(documents("code"))[::40]
    monkeypatch.setattr("minimegatron.data.corpus.documents", lambda kind: few)
    corpus = prepare_corpus(tmp_path, 400, "code")
    tokenizer, dataset = corpus.tokenizer(), IndexedDataset(corpus.data_path)
    assert dataset.sidecar["tokenizer"] == tokenizer.identity and len(dataset) == len(few) > 10
    for i in (0, len(few) - 1):
        ids = dataset[i].tolist()
        assert ids[-1] == tokenizer.eod and tokenizer.detokenize(ids) == few[i][1]
    before = os.stat(corpus.data_path + ".bin").st_mtime_ns
    assert prepare_corpus(tmp_path, 400, "code") == corpus
    assert os.stat(corpus.data_path + ".bin").st_mtime_ns == before
