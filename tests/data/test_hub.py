"""A data set by its name: which files are read, of a folder and of a hub that answers as the real one does."""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from minimegatron.data import hub
from minimegatron.data.corpus import prepare_corpus
from minimegatron.data.indexed import IndexedDataset
from minimegatron.errors import ConfigError, DataError
from tests.data.test_documents import parquet


def test_names():
    assert hub.parse("hf:a/b") == ("a/b", "", "train")
    assert hub.parse("hf:a/b/sample-10BT:validation") == ("a/b", "sample-10BT", "validation")
    assert hub.parse("hf:./x:test") == ("./x", "", "test") and hub.parse("hf:./x:test").is_folder
    for name in ("hf:", "hf::train", "hf:a/b:", "hf:a/b/c/d", "hf:a//b", "a/b"):
        with pytest.raises(ConfigError, match="names no data set"):
            hub.parse(name)


@pytest.fixture
def folder(tmp_path):
    """A data set of two files and two splits, a card, and a file that nobody reads."""
    data = tmp_path / "set"
    (data / "data").mkdir(parents=True)
    parquet(data / "data" / "train-00000-of-00002.parquet", [{"text": f"a{i}"} for i in range(300)])
    (data / "data" / "train-00001-of-00002.jsonl").write_text('{"text": "b"}\n')
    (data / "data" / "validation.jsonl").write_text('{"text": "held out"}\n')
    (data / "dataset_infos.py").write_text("raise SystemExit")
    return data


def test_a_folder(folder):
    found = list(hub.documents(f"hf:{folder}"))
    assert [text for _, text in found] == [*(f"a{i}" for i in range(300)), "b"]
    assert found[-1][0] == f"{folder}/data/train-00001-of-00002.jsonl:1"
    assert [text for _, text in hub.documents(f"hf:{folder}:validation")] == ["held out"]
    few = list(hub.documents(f"hf:{folder}", megabytes=1e-5))
    assert [text for _, text in few] == ["a0", "a1", "a2", "a3", "a4"], "10 bytes"
    with pytest.raises(DataError, match="no key 'body'") as caught:
        list(hub.documents(f"hf:{folder}", "body"))
    assert "--corpus-key" in caught.value.fix
    with pytest.raises(DataError, match="no file of the split 'test'"):
        hub.files_of(f"hf:{folder}:test")
    with pytest.raises(DataError, match="no such folder"):
        hub.files_of(f"hf:{folder}x")


def test_a_folder_becomes_a_corpus_and_a_changed_one_another(folder, tmp_path):
    first = prepare_corpus(tmp_path / "c", 300, f"hf:{folder}")
    data = IndexedDataset(first.data_path)
    assert len(data) == 301 and first.tokenizer().detokenize(data[300].tolist()[:-1]) == "b"
    assert prepare_corpus(tmp_path / "c", 300, f"hf:{folder}") == first
    (folder / "data" / "train-00001-of-00002.jsonl").write_text('{"text": "c"}\n')
    assert prepare_corpus(tmp_path / "c", 300, f"hf:{folder}") != first
    assert prepare_corpus(tmp_path / "c", 300, f"hf:{folder}", megabytes=1e-5) != first


FILES = {
    ("a/b", "refs/convert/parquet"): ["default/train/0000.parquet", "default/test/0000.parquet"],
    ("a/many", "refs/convert/parquet"): ["big/train/0000.parquet", "small/train/0000.parquet"],
    ("a/own", "main"): ["README.md", "train.jsonl"],
}


@contextlib.contextmanager
def pretended_hub(content):
    """The four requests that `huggingface_hub` makes to list and read a data set. Yields its address and what was read
    of files, in bytes."""
    read = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def answer(self, status, data=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": "c0ffee", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data if self.command != "HEAD" else b"")

        def do_GET(self):
            words = (
                self.path.partition("?")[0].replace("%2F", "/").replace("refs/convert/parquet", "refs-c-p").split("/")
            )
            if words[1] == "api" and words[2] == "datasets":
                revision = words[6].replace("refs-c-p", "refs/convert/parquet") if len(words) > 6 else "main"
                names = FILES.get(("/".join(words[3:5]), revision))
                if names is None:
                    return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
                if len(words) > 5 and words[5] == "tree":
                    return self.answer(200, json.dumps(self.tree(names, "/".join(words[7:]))).encode())
                facts = {"id": "/".join(words[3:5]), "sha": "c0ffee", "siblings": [], "tags": [], "private": False}
                return self.answer(200, json.dumps(facts | {"downloads": 0, "likes": 0}).encode())
            if words[1] == "datasets" and "resolve" in words:
                data = content["/".join(words[words.index("resolve") + 2 :])]
                first, last = 0, len(data) - 1
                if said := self.headers.get("Range"):
                    first, last = (int(n) for n in said.removeprefix("bytes=").split("-"))
                part = data[first : last + 1]
                read.append(len(part))
                return self.answer(
                    206 if said else 200, part, ETag='"e"', Content_Range=f"bytes {first}-{last}/{len(data)}"
                )
            return self.answer(404, b"{}")

        do_HEAD = do_GET

        def tree(self, names, below):
            inside = [name for name in names if not below or name.startswith(f"{below}/")]
            if "recursive=true" not in self.path.lower():
                depth = len(below.split("/")) if below else 0
                folders = {"/".join(name.split("/")[: depth + 1]) for name in inside if name.count("/") > depth}
                inside = [name for name in inside if name.count("/") == depth]
            else:
                folders = {name.rpartition("/")[0] for name in inside} | {name.split("/")[0] for name in inside}
            found = [{"type": "directory", "path": name, "oid": "0"} for name in folders if "." not in name and name]
            return found + [{"type": "file", "path": n, "oid": "0", "size": len(content[n])} for n in inside]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", read
    finally:
        server.shutdown()


READ = """
import json, sys
from minimegatron.data import hub
from minimegatron.errors import MinimegatronError
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = list(hub.documents(name, megabytes=2e-5))
    except MinimegatronError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_the_hub(tmp_path):
    """In a process of its own: the client reads its address when it is imported."""
    pytest.importorskip("huggingface_hub")
    content = {"README.md": b"# a card", "train.jsonl": b'{"text": "own"}\n'}
    for name in ("default/train", "default/test", "big/train", "small/train"):
        count = 200_000 if name == "big/train" else 9
        rows = [{"text": f"{name} {i}" + os.urandom(50).hex() * (i > 1)} for i in range(count)]
        content[f"{name}/0000.parquet"] = parquet(tmp_path / "x.parquet", rows, row_group_size=500).read_bytes()
    with pretended_hub(content) as (address, read):
        names = ["hf:a/b", "hf:a/b:test", "hf:a/many", "hf:a/many/big", "hf:a/own", "hf:a/none"]
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", READ, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    where = "hf://datasets/a/b@refs/convert/parquet/default/train/0000.parquet"
    assert found["hf:a/b"] == [[f"{where}:1", "default/train 0"], [f"{where}:2", "default/train 1"]]
    assert [text for _, text in found["hf:a/b:test"]] == ["default/test 0", "default/test 1"]
    assert "has the configurations big, small, and not 'default'" in found["hf:a/many"]
    assert "fix: hf:a/many/big" in found["hf:a/many"]
    assert [text for _, text in found["hf:a/many/big"]] == ["big/train 0", "big/train 1"]
    assert sum(read) < len(content["big/train/0000.parquet"]), "the beginning is read, and the index at the end"
    assert [text for _, text in found["hf:a/own"]] == ["own"]
    assert "the hub does not give it" in found["hf:a/none"] and "--corpus stdlib" in found["hf:a/none"]
