"""Tokenizers against Hugging Face's own, against stored vectors, and on what breaks them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.data.tokenizer import (
    NO_PAD,
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    build_tokenizer,
)
from minimegatron.data.tokenizer_training import train_bpe
from minimegatron.errors import ConfigError, DataError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "data_bpe.json").read_text())
SAMPLES = [
    "",
    " ",
    "hello world",
    "  two  blanks\n\ttab",
    "naïve café — 東京 🎉",
    "x = f(1, 2)  # 42",
    "a" * 700,
    "<|pad|>",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(GOLDEN["texts"], GOLDEN["vocab_size"], folder)
    return HuggingFaceTokenizer(folder)


def test_null_tokenizer_is_numbers_and_one_eod():
    tokenizer = NullTokenizer(50256)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (50257, 50256, NO_PAD)
    assert tokenizer.tokenize("3 0 50256") == [3, 0, 50256]
    assert tokenizer.detokenize([3, 0]) == "3 0"
    for text in ("3 x", "-1", "50257", "1.5"):
        with pytest.raises(DataError):
            tokenizer.tokenize(text)


@given(st.text())
def test_bytes_round_trip(text: str):
    tokenizer = ByteTokenizer()
    if any(0xD800 <= ord(c) < 0xE000 for c in text):
        with pytest.raises(DataError, match="surrogate"):
            tokenizer.tokenize(text)
        return
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.pad]) == text
    assert all(i < 256 for i in ids) and len({tokenizer.eod, tokenizer.pad} - set(range(256))) == 2


def test_bpe_equals_the_stored_vectors(bpe):
    assert bpe.vocab_size == GOLDEN["vocab_size"]
    for text, ids in GOLDEN["encodings"]:
        assert bpe.tokenize(text) == ids, text


def test_bpe_training_repeats_in_another_process(bpe, tmp_path):
    program = (
        "import json, sys; from minimegatron.data.tokenizer_training import train_bpe; "
        "g = json.load(open(sys.argv[1])); train_bpe(iter(g['texts']), g['vocab_size'], sys.argv[2])"
    )
    golden = Path(__file__).parents[1] / "golden" / "data_bpe.json"
    subprocess.run([sys.executable, "-c", program, str(golden), str(tmp_path)], check=True, timeout=60)
    again = HuggingFaceTokenizer(tmp_path)
    assert again.identity == bpe.identity


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_decodes_what_it_encoded(bpe, text: str):
    ids = bpe.tokenize(text)
    assert bpe.pad not in ids and bpe.eod not in ids
    assert bpe.detokenize(ids) == text
    assert all(0 <= i < bpe.vocab_size for i in ids)


def test_bpe_equals_transformers(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    train_bpe(GOLDEN["texts"], GOLDEN["vocab_size"], tmp_path)
    oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (oracle.eos_token_id, oracle.pad_token_id, len(oracle)) == (bpe.eod, bpe.pad, bpe.vocab_size)
    spelled = HuggingFaceTokenizer(tmp_path, split_special_tokens=False)
    for text in SAMPLES + GOLDEN["texts"]:
        ids = oracle(text, split_special_tokens=True).input_ids
        assert bpe.tokenize(text) == ids, text
        assert bpe.detokenize(ids) == oracle.decode(ids, skip_special_tokens=True) == text
        assert spelled.tokenize(text) == oracle(text, split_special_tokens=False).input_ids, text


def test_gpt2_files_equal_transformers(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = json.loads(bpe._fast.to_str())["model"]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    ours = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    try:
        oracle = transformers.GPT2Tokenizer(vocab=str(vocab), merges=str(merges))
        oracle("probe")
    except Exception:  # before transformers 5 the arguments have other names
        oracle = transformers.GPT2TokenizerFast(vocab_file=str(vocab), merges_file=str(merges))
    assert ours.eod == oracle.eos_token_id and ours.pad == NO_PAD
    for text in [*SAMPLES, "one<|endoftext|>two"]:
        assert ours.tokenize(text) == oracle(text, split_special_tokens=True).input_ids, text


@pytest.mark.parametrize("text", ["ab" * 500_000])
def test_one_word_of_a_million_letters(tmp_path, text):
    """Learning is quadratic in the longest word, minutes for this one, unless words are learned in pieces."""
    tokenizer = train_bpe([text], 400, tmp_path)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_words_up_to_256_bytes_are_learned_whole(tmp_path):
    word = "".join(chr(97 + i % 26) for i in range(200))
    tokenizer = train_bpe([word] * 5, 600, tmp_path)
    assert len(tokenizer.tokenize(word)) == 1
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["pre_tokenizer"]["type"] == "ByteLevel", "what learning needed is not what encoding does"


def test_pad_that_is_the_end_of_document_is_not_used(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe._fast.to_str())
    config = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="mask the loss"):
        tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.eod == bpe.eod and tokenizer.pad == NO_PAD


def test_a_saved_truncation_does_not_cut_documents(bpe, tmp_path):
    fast = type(bpe._fast).from_str(bpe._fast.to_str())
    fast.enable_truncation(4)
    fast.enable_padding(length=32, pad_id=1)
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    text = GOLDEN["texts"][0]
    assert HuggingFaceTokenizer(tmp_path).tokenize(text) == bpe.tokenize(text)


def test_special_tokens_of_the_family_are_added_as_in_megatron(bpe, tmp_path):
    from tokenizers.processors import TemplateProcessing

    fast = type(bpe._fast).from_str(bpe._fast.to_str())
    fast.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", bpe.pad)])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<|pad|>"}))
    plain = bpe.tokenize("hello")
    assert HuggingFaceTokenizer(tmp_path).tokenize("hello") == [bpe.pad, *plain]
    assert HuggingFaceTokenizer(tmp_path, add_special_tokens=False).tokenize("hello") == plain
    assert HuggingFaceTokenizer(tmp_path).bos == bpe.pad


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"tokenizer_type": "HugingFaceTokenizer"}, "did you mean `HuggingFaceTokenizer`"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "at least 1"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 9, "tokenizer_model": "x"}, "takes no tokenizer_model"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "--merge-file"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "meta-llama/Llama-3"}, "not downloaded"),
        ({"tokenizer_type": "ByteLevelTokenizer", "vocab_size": 300}, "258"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        build_tokenizer(**arguments)


def test_broken_tokenizer_files_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ConfigError, match="end-of-document"):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(ConfigError, match="at least 258"):
        train_bpe(["x"], 257, tmp_path)


@given(st.lists(st.sampled_from(["<|pad|>", "a", " the", "東", "\n\n", "  ", "\x00", "é"]), max_size=12).map("".join))
def test_ids_are_the_same_with_and_without_places(bpe, text):
    before, found = bpe.places, []
    try:
        for bpe.places in (False, True):
            found.append([bpe.tokenize(text, add_special_tokens=add) for add in (False, True)])
    finally:
        bpe.places = before
    assert found[0] == found[1]


def test_a_tokenizer_learned_from_files(tmp_path, capsys):
    """Of files in any form; its chat template is stored with it, and transformers spells a conversation by it."""
    from minimegatron.data.tokenizer_training import main

    (tmp_path / "a.txt").write_text("the cat and the hat and the bat " * 20)
    (tmp_path / "b.jsonl").write_text('{"text": "the end"}\n{"text": 1}\n')
    words = ["--vocab-size", "300", "--save", str(tmp_path / "t"), "--chat-template", "plain"]
    main(["--input", str(tmp_path / "a.txt"), *words])
    made = HuggingFaceTokenizer(tmp_path / "t")
    assert f"a byte-level BPE of {made.vocab_size} tokens" in capsys.readouterr().out
    assert len(made.tokenize(" the and")) == 2
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    transformers = pytest.importorskip("transformers")
    told = transformers.AutoTokenizer.from_pretrained(tmp_path / "t").apply_chat_template(said, tokenize=False)
    assert made.apply_chat_template(said) == told == "User: Hi\nYes<|endoftext|>"
    with pytest.raises(DataError, match="int, not text") as caught:
        main(["--input", str(tmp_path / "b.jsonl"), *words])
    assert caught.value.where == f"{tmp_path}/b.jsonl:2"
    with pytest.raises(ConfigError, match="--chat-template"):
        main(["--input", str(tmp_path / "a.txt"), *words[:-1], str(tmp_path / "none")])
