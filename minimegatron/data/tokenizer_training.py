"""Tokenizers that are made here: a byte-level BPE learned from texts, and files for tokenizers that have no folder.

A model is published with its tokenizer: the folder of a `HuggingFaceTokenizer` unchanged, else the files of
`made_files`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

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
from minimegatron.errors import ConfigError

LONGEST_TRAINED_WORD = 256


def train_bpe(texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str]) -> HuggingFaceTokenizer:
    """Learn a byte-level BPE vocabulary and save it as a Hugging Face tokenizer folder.

    The same texts give the same files. Words longer than 256 bytes are learned in pieces of 256: the cost of learning
    is quadratic in the longest word, and a document of one letter a million times must not take an hour.

    Args:
        texts: documents to learn from.
        vocab_size: number of tokens, `<|endoftext|>` (id 0), `<|pad|>` (id 1) and the 256 bytes among them. A small
            corpus may give fewer; read `.vocab_size` of the result.
        folder: receives `tokenizer.json` and `tokenizer_config.json`; created when missing.

    Raises:
        ConfigError: `vocab_size` is below 258.
    """
    smallest = 256 + len((END_OF_TEXT, PAD))
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size is {vocab_size}", fix=f"at least {smallest}: 256 bytes and two special tokens")
    fast = byte_level(models.BPE())
    whole_words = fast.pre_tokenizer
    pieces = pre_tokenizers.Split(tokenizers.Regex(f".{{1,{LONGEST_TRAINED_WORD}}}"), behavior="isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([whole_words, pieces])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    fast.pre_tokenizer = whole_words
    os.makedirs(folder, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "pad_token": PAD}
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
