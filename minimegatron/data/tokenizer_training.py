"""Tokenizers that are made here: a byte-level BPE learned from texts, and files for tokenizers that have no folder.

    minimegatron train-tokenizer --input corpus.jsonl --vocab-size 8192 --save tokenizer

A model is published with its tokenizer: the folder of a `HuggingFaceTokenizer` unchanged, else the files of
`made_files`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from minimegatron.bars import tqdm
from minimegatron.data.documents import reader_of
from minimegatron.data.jsonl import parse_document
from minimegatron.data.publish import publish, to_json
from minimegatron.data.tokenizer import (
    END_OF_TEXT,
    PAD,
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    byte_level,
)
from minimegatron.data.tokenizer_files import PLAIN
from minimegatron.errors import ConfigError, DataError
from minimegatron.flags import Parser

LONGEST_TRAINED_WORD = 256


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike[str],
    chat_template: str | None = None,
    special: Sequence[str] = (),
) -> HuggingFaceTokenizer:
    """Learn a byte-level BPE vocabulary and save it as a Hugging Face tokenizer folder.

    The same texts give the same files. Words longer than 256 bytes are learned in pieces of 256: the cost of learning
    is quadratic in the longest word, and a document of one letter a million times must not take an hour.

    Args:
        texts: documents to learn from.
        vocab_size: number of tokens, `<|endoftext|>` (id 0), `<|pad|>` (id 1) and the 256 bytes among them. A small
            corpus may give fewer; read `.vocab_size` of the result.
        folder: receives `tokenizer.json` and `tokenizer_config.json`; created when missing.
        chat_template: a Jinja template that spells a conversation, stored with the tokenizer.
        special: further special tokens, with ids from 2 on.

    Raises:
        ConfigError: `vocab_size` is below 258 and these.
    """
    tokens = [END_OF_TEXT, PAD, *special]
    smallest = 256 + len(tokens)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size is {vocab_size}", fix=f"at least {smallest}: 256 bytes and {len(tokens)} special tokens"
        )
    fast = byte_level(models.BPE())
    whole_words = fast.pre_tokenizer
    pieces = pre_tokenizers.Split(tokenizers.Regex(f".{{1,{LONGEST_TRAINED_WORD}}}"), behavior="isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([whole_words, pieces])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    fast.pre_tokenizer = whole_words
    os.makedirs(folder, exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"eos_token": END_OF_TEXT, "pad_token": PAD}
    config |= {"additional_special_tokens": list(special)} if special else {}
    config |= {} if chat_template is None else {"chat_template": chat_template}
    publish(os.path.join(folder, "tokenizer_config.json"), to_json(config))
    publish(os.path.join(folder, "tokenizer.json"), fast.to_str(pretty=True).encode())
    return HuggingFaceTokenizer(folder)


# Bytes that are no printable letter of Latin-1 get letters behind it, in GPT-2's order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


def made_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files of a tokenizer that has no folder; {} for one that no file can describe."""
    if isinstance(tokenizer, GPT2BPETokenizer):
        return _files(tokenizer._fast, {"eos_token": END_OF_TEXT})
    if isinstance(tokenizer, ByteTokenizer):
        fast = byte_level(models.BPE({letter: byte for byte, letter in _LETTERS.items()}, []))
        fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False), AddedToken(PAD, normalized=False)])
        return _files(fast, {"eos_token": END_OF_TEXT, "pad_token": PAD})
    return {}


def _files(fast: FastTokenizer, special: dict[str, str]) -> dict[str, bytes]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    return {"tokenizer.json": fast.to_str(pretty=True).encode(), "tokenizer_config.json": to_json(config)}


def texts_of(paths: Sequence[str], key: str, megabytes: float) -> Iterator[str]:
    """Texts of files of documents, until they have reached a size; with a bar on stderr, if that is a terminal.

    Raises:
        DataError: a file that cannot be read, or a document without text.
    """
    with tqdm(total=int(megabytes * 1e6), desc="reading", unit="B", unit_scale=True, disable=None) as bar:
        for path in paths:
            for line in reader_of(path, [key]):
                try:
                    if line.data is None:
                        raise DataError("a document of more than 64 MiB")
                    texts = parse_document(line.data, (key,))[key]
                except DataError as error:
                    raise DataError(error.what, where=f"{path}:{line.number}", fix="mend or remove the line") from error
                yield from texts
                bar.update(sum(len(text.encode("utf-8", "surrogatepass")) for text in texts))
                if bar.n >= megabytes * 1e6:
                    return


def main(argv: Sequence[str] | None = None) -> None:
    """Learn a tokenizer from files.

    Raises:
        ConfigError: a vocabulary that is too small.
        DataError: see `texts_of`.
    """
    parser = Parser(
        prog="minimegatron train-tokenizer", description="a byte-level BPE learned from files, as Hugging Face loads it"
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSONL, text or Parquet, plain or compressed")
    add(
        "--vocab-size", type=int, required=True, metavar="N", help="tokens, the 256 bytes and 2 special ones among them"
    )
    add("--save", required=True, metavar="FOLDER", help="receives tokenizer.json and tokenizer_config.json")
    add("--json-key", default="text", metavar="NAME", help="key or column of the text (default: text)")
    add("--megabytes", type=float, default=100, metavar="X", help="of text to learn from (default: %(default)s)")
    add("--chat-template", metavar="FILE|plain", help="stored with the tokenizer, for sft and serve; plain: in words")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        template = (
            PLAIN if args.chat_template == "plain" else args.chat_template and Path(args.chat_template).read_text()
        )
    except OSError as error:
        raise ConfigError(f"--chat-template: {error}", fix="a Jinja file, or `plain`") from error
    made = train_bpe(list(texts_of(args.input, args.json_key, args.megabytes)), args.vocab_size, args.save, template)
    print(f"{args.save}: a byte-level BPE of {made.vocab_size:,} tokens")
