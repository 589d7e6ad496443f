"""JSONL to `.bin/.idx`: any number of workers gives the same bytes; errors name the line and leave nothing."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.preprocess import main, preprocess
from minimegatron.data.tokenizer_training import train_bpe
from minimegatron.errors import ConfigError, DataError
from tests.thorough import SLOW

BYTES = {"tokenizer_type": "ByteLevelTokenizer"}
NULL = {"tokenizer_type": "NullTokenizer", "vocab_size": 70000}


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def random_documents(seed, count):
    rng = np.random.RandomState(seed)
    words = ["alpha", "βeta", "γ", "delta\n", " ", "🎉"]
    return [{"text": " ".join(rng.choice(words, rng.randint(0, 40))), "id": i} for i in range(count)]


def command(*arguments):
    return [sys.executable, "-m", "minimegatron.data.preprocess", *map(str, arguments)]


def run(*arguments, timeout=120):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout)


def test_documents_come_back_in_order(tmp_path):
    documents = random_documents(0, 700)
    summary = preprocess([write_jsonl(tmp_path / "a.jsonl", documents)], tmp_path / "p", BYTES, append_eod=True)
    dataset = IndexedDataset(tmp_path / "p_text_document", vocab_size=258)
    texts = [document["text"] for document in documents]
    found = []
    for begin, end in zip(dataset.document_indices[:-1], dataset.document_indices[1:], strict=True):
        assert end - begin in (0, 1)
        ids = dataset[int(begin)].tolist() if end > begin else []
        assert not ids or ids[-1] == 256
        found.append(bytes(ids[:-1]).decode())
    assert found == texts
    assert (summary.documents, summary.empty_documents) == (700, texts.count(""))
    assert summary.tokens == len(dataset.tokens) and dataset.sidecar["tokenizer"] == "bytes:258"


CHAT = ["<|im_start|>user<|im_end|>", "about <|im_end|>", "nothing"]


def test_special_tokens_that_documents_spell_are_counted(tmp_path):
    """Letters unless a flag says otherwise; the summary says what was done, with the numbers."""
    train_bpe(CHAT, 258, tmp_path)
    rule = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rule.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    rule.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 258)])
    rule.save(str(tmp_path / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in CHAT])
    arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    letters = preprocess([path], tmp_path / "a", arguments)
    assert letters.spelled == {"<|im_end|>": 2, "<|im_start|>": 1} and letters.twice == 0
    assert "special tokens (<|im_end|> 2, <|im_start|> 1), read as letters; --no-split-special-tokens" in str(letters)
    ids = IndexedDataset(tmp_path / "a_text_document")
    assert [list(one).count(259) for one in ids] == [0, 0, 0] and all(one[0] == 258 for one in ids)

    arguments["split_special_tokens"] = False
    tokens = preprocess([path], tmp_path / "b", arguments)
    assert "read as tokens" in str(tokens) and "1 documents begin with bos twice; --no-add-special" in str(tokens)
    ids = IndexedDataset(tmp_path / "b_text_document")
    assert [list(one).count(259) for one in ids] == [1, 1, 0] and ids[0].tolist()[:2] == [258, 258]
    bare = preprocess([path], tmp_path / "c", arguments | {"add_special_tokens": False})
    ids = IndexedDataset(tmp_path / "c_text_document")
    assert bare.twice == 0 and [list(one).count(258) for one in ids] == [1, 0, 0]
    plain = preprocess([write_jsonl(tmp_path / "d.jsonl", [{"text": "x"}])], tmp_path / "d", arguments)
    assert "spell" not in str(plain)


def test_the_flags_of_special_tokens(tmp_path, capsys):
    train_bpe(CHAT, 258, tmp_path)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a<|endoftext|>"}])
    line = ["--input", path, "--output-prefix", str(tmp_path / "p"), "--workers", "1", "--tokenizer-type"]
    hugging_face = [*line, "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    for flags, count in (([], 0), (["--split-special-tokens"], 0), (["--no-split-special-tokens"], 1)):
        assert main([*hugging_face, *flags]) == 0
        assert IndexedDataset(tmp_path / "p_text_document").tokens.tolist().count(0) == count
        assert f"<|endoftext|> 1), read as {'tokens' if count else 'letters'}" in capsys.readouterr().out
    assert main([*line, "ByteLevelTokenizer", "--no-split-special-tokens"]) == 2
    assert "ByteLevelTokenizer takes no split_special_tokens" in capsys.readouterr().err


def test_a_file_of_another_format_is_refused_before_any_work(tmp_path, capsys):
    good = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match="an Arrow file, and JSONL is expected"):
        preprocess([good, tmp_path / "b"], tmp_path / "p", BYTES, on_bad_line="skip")
    with pytest.raises(DataError, match=r"no such file; .*a.jsonl is text") as error:
        IndexedDataset(good)
    assert "minimegatron preprocess" in error.value.fix
    assert main(["--input", good, "--output-prefix", "p"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "--tokenizer-type" in said[0] and len(said) <= 6


def test_without_shared_memory_one_process_does_the_work_and_says_so(tmp_path, monkeypatch):
    def no_semaphores(*_, **__):
        raise OSError(28, "No space left on device")

    path = write_jsonl(tmp_path / "a.jsonl", random_documents(2, 50))
    preprocess([path], tmp_path / "one", BYTES, workers=1)
    monkeypatch.setattr("minimegatron.data.encoding.ProcessPoolExecutor", no_semaphores)
    with pytest.warns(UserWarning, match="2 workers cannot be started .*No space left.* writable /dev/shm"):
        preprocess([path], tmp_path / "two", BYTES, workers=2)
    assert (tmp_path / "one_text_document.bin").read_bytes() == (tmp_path / "two_text_document.bin").read_bytes()


@SLOW
def test_workers_and_compression_change_nothing(tmp_path):
    """Three workers against one, plain against gzip, through the command line, byte for byte."""
    documents = random_documents(1, 3000)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    preprocess([path], tmp_path / "one", BYTES)
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--log-interval", 1000]
    done = run("--input", f"{path}.gz", "--output-prefix", tmp_path / "many", "--workers", 3, *flags)
    assert done.returncode == 0, done.stderr
    assert "3,000 documents" in done.stdout and done.stderr.count("processed") == 3
    for suffix in (".bin", ".idx", ".json"):
        name = f"text_document{suffix}"
        assert (tmp_path / f"one_{name}").read_bytes() == (tmp_path / f"many_{name}").read_bytes()
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} == set()


def test_several_keys_and_lists_of_sentences(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": ["1 2", "", "3"], "b": "4"}, {"a": [], "b": "5 6"}])
    summary = preprocess([path], tmp_path / "p", NULL, json_keys=("a", "b"), append_eod=True)
    a, b = (IndexedDataset(summary.prefixes[key]) for key in "ab")
    assert [ids.tolist() for ids in a] == [[1, 2], [3, 70000]] and a.document_indices.tolist() == [0, 2, 2]
    assert [ids.tolist() for ids in b] == [[4, 70000], [5, 6, 70000]] and a.dtype == np.int32


def test_several_inputs_and_patterns(tmp_path):
    for i in (2, 0, 1):
        write_jsonl(tmp_path / f"part-{i}.jsonl", [{"text": str(i)}])
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--workers", "1")
    assert main(["--input", str(tmp_path / "part-*.jsonl"), "--output-prefix", str(tmp_path / "p"), *flags]) == 0
    assert IndexedDataset(tmp_path / "p_text_document").tokens.tolist() == [0, 1, 2]


BAD_LINES = {
    "bad UTF-8": b'{"text": "\xff"}',
    "bad JSON": b'{"text": "a"',
    "no key": b'{"txt": "a"}',
    "not text": b'{"text": 3}',
    "surrogate": b'{"text": "\\ud800"}',
    "too deep": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "longer than": b'{"text": "' + b"a" * 400_000 + b'"}',
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_stops_the_run_or_is_counted(tmp_path, kind):
    good = [json.dumps(document).encode() for document in random_documents(3, 400)]
    k = 137
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*good[:k], BAD_LINES[kind], *good[k:]]))
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=kind) as caught:
        preprocess([path], tmp_path / "out" / "p", BYTES, max_line_bytes=300_000)
    assert caught.value.where == f"{path}:{k + 1}" and os.listdir(tmp_path / "out") == []
    options = {"on_bad_line": "skip", "max_line_bytes": 300_000}
    assert preprocess([path], tmp_path / "out" / "p", BYTES, **options).skipped_lines == 1
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good))
    preprocess([tmp_path / "good.jsonl"], tmp_path / "out" / "q", BYTES)
    for suffix in ("bin", "idx"):
        name = f"text_document.{suffix}"
        assert (tmp_path / "out" / f"p_{name}").read_bytes() == (tmp_path / "out" / f"q_{name}").read_bytes()


def test_a_bad_line_in_a_worker(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n' * 900 + '{"text": "x"}\n' + '{"text": "1"}\n' * 900)
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 5, "--workers", 2]
    done = run("--input", path, "--output-prefix", tmp_path / "p", *flags)
    assert done.returncode == 4 and f"{path}:901" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    "flags, status, says",
    [
        (["--json-kyes", "text"], 2, "did you mean `--json-keys`"),
        (["--tokenizer-type", "NulTokenizer"], 2, "did you mean `NullTokenizer`"),
        (["--split-sentences"], 2, "list of sentences"),
        (["--workers", "0"], 2, "workers 0"),
        (["--tokenizer-model", "x"], 2, "takes no tokenizer_model"),
        (["--input", "/nonexistent/*.jsonl"], 4, "No such file"),
        (["--output-prefix", "/nonexistent/p"], 4, "mkdir"),
        (["--json-keys", "nope"], 4, "a.jsonl:1"),
    ],
)
def test_exit_status_and_message(tmp_path, capsys, flags, status, says):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    base = ["--input", path, "--output-prefix", str(tmp_path / "p"), "--tokenizer-type", "ByteLevelTokenizer"]
    assert main([*base, "--workers", "1", *flags]) == status
    assert says in capsys.readouterr().err and os.listdir(tmp_path) == ["a.jsonl"]


def test_megatrons_flags_without_effect_say_so(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    base = ["--input", path, "--output-prefix", str(tmp_path / "p"), "--tokenizer-type", "ByteLevelTokenizer"]
    assert main([*base, "--workers", "1", "--partitions", "4", "--keep-sequential-samples"]) == 0
    assert "change nothing" in capsys.readouterr().err


def test_an_empty_corpus_is_refused(tmp_path):
    for content in ("", "\n\n", '{"text": ""}\n'):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(DataError, match="no token"):
            preprocess([tmp_path / "a.jsonl"], tmp_path / "p", BYTES)
    with pytest.raises(ConfigError):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "p", BYTES, json_keys=())
    assert os.listdir(tmp_path) == ["a.jsonl"]


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def is_worker(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"spawn_main" in file.read()
    except OSError:
        return False


UNWANTED = """
from minimegatron.data.encoding import Encoder, Encoding
from minimegatron.data.jsonl import Line

lines = [[Line(i, b'{"text": "%s"}' % (b"a" * 300_000), 0)] for i in range(8)]
try:
    with Encoder(Encoding((("tokenizer_type", "ByteLevelTokenizer"),), ("text",), False), 2) as encoder:
        results = encoder.encode(lines)
        next(results)
        workers = list(encoder._pool._processes.values())
        raise OSError
except OSError:
    print([worker.exitcode for worker in workers])
"""


@SLOW
def test_workers_whose_results_are_not_wanted_are_not_killed():
    """Half of a result, which a killed worker leaves in the pipe, is waited for: one run in three did not end."""
    done = subprocess.run([sys.executable, "-c", UNWANTED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 0]\n", done.stderr


@pytest.fixture
def endless(tmp_path):
    """A run with two workers whose input never ends, once its workers are up."""
    os.mkfifo(tmp_path / "pipe")
    flags = ("--tokenizer-type", "ByteLevelTokenizer", "--workers", 2)
    arguments = command("--input", tmp_path / "pipe", "--output-prefix", tmp_path / "p", *flags)
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    pipe = open(tmp_path / "pipe", "wb", buffering=0)
    try:
        pipe.write(b'{"text": "a"}\n' * 1200)
        end = time.monotonic() + 30
        while len(workers := [pid for pid in children(process.pid) if is_worker(pid)]) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        yield process, workers
    finally:
        pipe.close()
        process.kill()
        process.communicate(timeout=30)


def gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") and is_worker(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(os.path.exists(f"/proc/{pid}") and is_worker(pid) for pid in pids)


def feed(tmp_path, data):
    """More lines for the pipe from a second writer, so that the run notices what happened meanwhile, if it has not."""
    with contextlib.suppress(OSError):  # the run has ended: nobody reads, and a blocking open would wait for ever
        pipe = os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, data)
        finally:
            os.close(pipe)


def test_a_killed_worker_is_an_error_and_not_a_hang(endless, tmp_path):
    process, workers = endless
    os.kill(workers[0], signal.SIGKILL)
    time.sleep(0.3)
    feed(tmp_path, b'{"text": "a"}\n' * 4000)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 5 and "a worker that tokenises lines died" in stderr
    assert sorted(os.listdir(tmp_path)) == ["pipe"] and gone(workers)


def test_workers_end_with_a_killed_parent(endless, tmp_path):
    process, workers = endless
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert gone(workers)
    (abandoned,) = (name for name in os.listdir(tmp_path) if name != "pipe")
    assert abandoned.startswith(".p_text_document.bin.") and abandoned.endswith(".tmp")
    preprocess([write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])], tmp_path / "p", BYTES)
    assert abandoned not in os.listdir(tmp_path), "the next run sweeps up"


def test_ctrl_c(endless, tmp_path):
    process, workers = endless
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    assert os.listdir(tmp_path) == ["pipe"] and gone(workers)
