"""Text to token ids and back.

A tokenizer is a vocabulary and a rule. Byte-level BPE, the rule of GPT-2 and of nearly every model since, starts from
the 256 bytes and merges the most frequent neighbouring pair, again and again, until the vocabulary is full; encoding
replays the merges in the order in which they were learned. Any text can be encoded, and decoding is exact.

| `--tokenizer-type`     | arguments                        | vocabulary               | end of document    |
|------------------------|----------------------------------|--------------------------|--------------------|
| `NullTokenizer`        | `--vocab-size N`                 | ids 0..N-1, then the eod | N                  |
| `HuggingFaceTokenizer` | `--tokenizer-model FOLDER`       | of `tokenizer.json`      | its eos token      |
| `GPT2BPETokenizer`     | `--vocab-file`, `--merge-file`   | of `vocab.json`          | `<|endoftext|>`    |
| `ByteLevelTokenizer`   | none                             | 256 bytes, eod, pad      | 256                |

The first three are Megatron's names and meanings. `ByteLevelTokenizer` is ours: Megatron's class of that name takes
the bytes 0 and 1 for eod and pad, so that a text which holds them is cut or masked there; ours puts both after them.

**The pad trap.** Training masks the loss where the label is the pad token. Many published tokenizers (Qwen's base
models among them) use one token for padding and for the end of a document; then the loss on every end of document is
masked too, and the model never learns to stop. Here `pad` differs from `eod` always: where a tokenizer says otherwise
or has none, `pad` is `NO_PAD` (-1), an id that no text contains, and a warning says so.

**Text is text.** A document that holds the letters `<|endoftext|>` (this one, for example) does not end there: special
tokens are put in by programs, never spelled by a text. Hugging Face reads them out of a text unless
`split_special_tokens` is set; here that is what a prompt's template has to ask for (`spelled_special_tokens`).

**One long word.** A megabyte without a blank is one word. Encoding it costs n log n, about a second, so words are not
cut there: cutting would change the ids, and those of a published tokenizer are not ours to change. Learning is
quadratic in the longest word, and cuts (`train_bpe`).

The rules are executed by the `tokenizers` library. Nothing is ever downloaded.
In Megatron-LM: `megatron/core/tokenizers/`. Paper: Sennrich et al. 2016, arXiv 1508.07909.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from minimegatron.data.publish import publish, read_json, to_json
from minimegatron.errors import ConfigError, DataError, did_you_mean

NO_PAD = -1
END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
LONGEST_TRAINED_WORD = 256


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer.

    Attributes:
        vocab_size: number of ids; every id is in [0, vocab_size).
        eod: id that ends a document.
        pad: id for padding, different from `eod`; `NO_PAD` when there is none.
        bos: id that begins a document, or None.
        identity: names the mapping: equal for two tokenizers only if they give the same ids.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def identity(self) -> str: ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text. Raises DataError for a text that has none (a lone surrogate; a word that is no id)."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of some ids. Raises DataError for an id outside the vocabulary."""
        ...


class NullTokenizer:
    """Numbers separated by blanks are the ids themselves; `vocab_size` numbers, then the end of document."""

    pad = NO_PAD
    bos = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"vocab_size is {vocab_size}", fix="at least 1")
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1
        self.identity = f"null:{self.vocab_size}"

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"not a number: {error}", fix="NullTokenizer reads ids separated by blanks") from error
        _check_ids(ids, self.vocab_size)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids; eod is 256 and pad 257."""

    vocab_size, eod, pad, bos = 258, 256, 257, None
    identity = "bytes:258"

    def tokenize(self, text: str) -> list[int]:
        return list(_utf8(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class _FastTokenizer:
    """A tokenizer that the `tokenizers` library executes; special tokens by their text, where it has them."""

    def __init__(
        self,
        fast: FastTokenizer,
        eos_token: str | None,
        pad_token: str | None,
        bos_token: str | None,
        where: str,
        spelled_special_tokens: bool = False,
    ) -> None:
        fast.no_truncation()  # a tokenizer.json may carry the lengths of a fine-tuning run; documents stay whole
        fast.no_padding()
        fast.encode_special_tokens = not spelled_special_tokens  # as ordinary letters
        self._fast = fast
        self._include_special_tokens = True
        vocabulary = fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        eod = vocabulary.get(eos_token) if eos_token else None
        if eod is None:
            raise ConfigError(
                f"the tokenizer has no end-of-document token (eos_token is {eos_token!r})",
                where=where,
                fix='name one of its tokens as "eos_token" in tokenizer_config.json',
            )
        self.eod = eod
        self.bos = vocabulary.get(bos_token) if bos_token else None
        self.pad = vocabulary.get(pad_token, NO_PAD) if pad_token else NO_PAD
        if self.pad == self.eod:
            warnings.warn(
                f"{where}: pad and end of document are the same token {eos_token!r}; padding by it would mask the loss "
                "on every end of document, so it is not used as pad",
                stacklevel=3,
            )
            self.pad = NO_PAD
        self.identity = "tokenizers:" + hashlib.sha256(fast.to_str().encode()).hexdigest()
        if spelled_special_tokens:
            self.identity += "+spelled"

    def tokenize(self, text: str) -> list[int]:
        _utf8(text)
        return self._fast.encode(text, add_special_tokens=self._include_special_tokens).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return self._fast.decode(list(ids), skip_special_tokens=True)


class HuggingFaceTokenizer(_FastTokenizer):
    """The `tokenizer.json` of a Hugging Face model's folder; special tokens from `tokenizer_config.json`.

    Args:
        folder: holds `tokenizer.json` (and usually `tokenizer_config.json`), or is the path of a `tokenizer.json`.
        include_special_tokens: whether `tokenize` adds what the model family adds, e.g. Llama's begin-of-text. On by
            default, as in Megatron.
        spelled_special_tokens: whether "<|endoftext|>" in a text is that token, as in Hugging Face: for prompts whose
            template spells them, never for documents, and never for what a user has typed.

    Raises:
        ConfigError: no such file, a broken one, or one without an end-of-document token.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        include_special_tokens: bool = True,
        spelled_special_tokens: bool = False,
    ) -> None:
        folder = os.fspath(folder)
        path = folder if os.path.isfile(folder) else os.path.join(folder, "tokenizer.json")
        if not os.path.isfile(path):
            raise ConfigError(
                f"no tokenizer.json at {folder!r}",
                fix="give the folder of a downloaded model; names on the hub are not downloaded here",
            )
        config: dict = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second one wins
            beside = os.path.join(os.path.dirname(path), name)
            if os.path.isfile(beside):
                config |= read_json(beside)
        try:
            fast = FastTokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception for every broken file
            raise ConfigError(
                f"not a tokenizer: {error}", where=path, fix="a tokenizer.json that the tokenizers library has written"
            ) from error
        eos, pad, bos = (_token_text(config.get(key)) for key in ("eos_token", "pad_token", "bos_token"))
        super().__init__(fast, eos, pad, bos, folder, spelled_special_tokens)
        self._include_special_tokens = include_special_tokens
        self.chat_template = config.get("chat_template")


class GPT2BPETokenizer(_FastTokenizer):
    """GPT-2's original pair of files, `vocab.json` and `merges.txt`.

    Raises:
        ConfigError: a missing or broken file, or a vocabulary without `<|endoftext|>`.
    """

    def __init__(self, vocab_file: str | os.PathLike[str], merge_file: str | os.PathLike[str]) -> None:
        for path in (vocab_file, merge_file):
            if not os.path.isfile(path):
                raise ConfigError(
                    f"no such file: {os.fspath(path)!r}", fix="give --vocab-file and --merge-file of GPT-2"
                )
        try:
            model = models.BPE.from_file(os.fspath(vocab_file), os.fspath(merge_file))
        except Exception as error:
            raise ConfigError(
                f"not a GPT-2 vocabulary: {error}",
                where=f"{vocab_file}, {merge_file}",
                fix="give vocab.json and merges.txt of GPT-2",
            ) from error
        fast = _byte_level(model)
        if fast.token_to_id(END_OF_TEXT) is not None:
            fast.add_special_tokens([END_OF_TEXT])
        super().__init__(fast, END_OF_TEXT, None, None, where=os.fspath(vocab_file))


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
    fast = _byte_level(models.BPE())
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


TOKENIZERS: dict[str, tuple[Callable[..., Tokenizer], tuple[str, ...]]] = {
    "NullTokenizer": (NullTokenizer, ("vocab_size",)),
    "HuggingFaceTokenizer": (HuggingFaceTokenizer, ("tokenizer_model",)),
    "GPT2BPETokenizer": (GPT2BPETokenizer, ("vocab_file", "merge_file")),
    "ByteLevelTokenizer": (ByteTokenizer, ()),
}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    vocab_file: str | os.PathLike[str] | None = None,
    merge_file: str | os.PathLike[str] | None = None,
) -> Tokenizer:
    """The tokenizer of Megatron's flags; see the table of this module.

    Raises:
        ConfigError: an unknown type, a missing argument, or one that contradicts the type.
    """
    if tokenizer_type not in TOKENIZERS:
        near = did_you_mean(tokenizer_type, TOKENIZERS) or f"one of {', '.join(TOKENIZERS)};"
        fix = f"{near} a SentencePiece or tiktoken model is read once it is exported as tokenizer.json"
        raise ConfigError(f"unknown tokenizer_type {tokenizer_type!r}", fix=fix)
    make, needs = TOKENIZERS[tokenizer_type]
    given = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file}
    for name, value in given.items():
        if value is not None and name not in needs:
            raise ConfigError(f"{tokenizer_type} takes no {name}, but it is {value!r}", fix="drop it")
    given["vocab_size"] = vocab_size  # type: ignore[assignment]
    for name in needs:
        if given[name] is None:
            raise ConfigError(f"{tokenizer_type} needs {name}", fix=f"give --{name.replace('_', '-')}")
    tokenizer = make(*(given[name] for name in needs))
    if vocab_size is not None and "vocab_size" not in needs and vocab_size != tokenizer.vocab_size:
        what = f"vocab_size is {vocab_size}, but this {tokenizer_type} has {tokenizer.vocab_size} tokens"
        raise ConfigError(what, fix="drop --vocab-size; the tokenizer knows")
    return tokenizer


def _byte_level(model: models.Model) -> FastTokenizer:
    fast = FastTokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def _token_text(token: str | dict | None) -> str | None:
    """A special token as Hugging Face's files spell it: its text, or an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"half of a surrogate pair, {text[error.start]!r}, at character {error.start}",
            fix="decode the text with errors='replace', or drop the character",
        ) from error


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token id {token} is outside the vocabulary [0, {vocab_size})",
                where=f"position {position}",
                fix="use the tokenizer that the ids are of",
            )
