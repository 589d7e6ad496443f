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

The first three are Megatron's names and meanings. `ByteLevelTokenizer` differs from Megatron's class of that name,
which uses the bytes 0 and 1 for eod and pad, so that a text with these bytes is cut or masked there; here eod and pad
follow after the bytes.

**The pad trap.** Training masks the loss where the label is the pad token. Many published tokenizers (Qwen's base
models among them) use one token for padding and for the end of a document; then the loss on every end of document is
masked too, and the model never learns to stop. Here `pad` always differs from `eod`: if a tokenizer has no pad or the
same one, `pad` is `NO_PAD` (-1), an id that no text contains, and a warning says so.

**Special tokens in a text.** The letters `<|endoftext|>` in a document do not end it: special tokens are added by
programs. Hugging Face reads them out of a text unless `split_special_tokens` is set. Here it is set for documents, and
not for prompts, whose writer may mean them: a chat template writes many (`data/tokenizer_files`).

**Very long words.** A megabyte without a blank is one word. Encoding it costs n log n, about a second, so words are not
cut there: cutting would change the ids of a published tokenizer. Learning is quadratic in the longest word, so it does
cut (`data/tokenizer_training`).

The rules are executed by the `tokenizers` library. Nothing is ever downloaded.
In Megatron-LM: `megatron/core/tokenizers/`. Paper: Sennrich et al. 2016, arXiv 1508.07909.
"""

from __future__ import annotations

import collections
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minimegatron.data.tokenizer_files import read_tokenizer, render
from minimegatron.errors import ConfigError, DataError, did_you_mean

NO_PAD = -1
END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: number of ids; every id is in [0, vocab_size).
        eod: id that ends a document.
        pad: id for padding, different from `eod`; `NO_PAD` when there is none.
        bos: id that begins a document, or None.
        identity: identifies the vocabulary: equal for two tokenizers only if each id is the same word in both.
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

    def spellings(self) -> Mapping[str, int]:
        """How the vocabulary spells ids; {} where it says nothing of their words."""
        ...

    def spelled(self, text: str) -> Mapping[str, int]:
        """How often a text contains the letters of each special token, whether or not `tokenize` reads them as one."""
        ...


class NullTokenizer:
    """Numbers separated by blanks are the ids themselves; `vocab_size` ids, then the end of document."""

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

    def spellings(self) -> Mapping[str, int]:
        return {}

    def spelled(self, text: str) -> Mapping[str, int]:
        return {}


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids; eod is 256 and pad 257."""

    vocab_size, eod, pad, bos = 258, 256, 257, None
    identity = "bytes:258"

    def tokenize(self, text: str) -> list[int]:
        return list(_utf8(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def spellings(self) -> Mapping[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def spelled(self, text: str) -> Mapping[str, int]:
        return {}


class _FastTokenizer:
    """A tokenizer of the `tokenizers` library, with its special tokens by their text.

    Args:
        fast: the rule.
        named: {"eos_token": text, ...}.
        where: for messages.
        split_special_tokens: see `HuggingFaceTokenizer`.
        vocabulary: the word of each id, for `identity`.
    """

    def __init__(
        self, fast: FastTokenizer, named: Mapping[str, str], where: str, split_special_tokens: bool, vocabulary: str
    ) -> None:
        fast.encode_special_tokens = split_special_tokens
        self._fast = fast
        self.places = True  # False: `encode_batch_fast`, which does not note where in the text each id is
        self._add_special_tokens = True
        self.split_special_tokens = split_special_tokens
        self.named = dict(named)
        ids = fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        eos_token, pad_token, bos_token = (named.get(name) for name in ("eos_token", "pad_token", "bos_token"))
        eos_token = eos_token or named.get("sep_token")  # BERT's [SEP] ends each text
        eod = ids.get(eos_token) if eos_token else None
        if eod is None:
            raise ConfigError(
                f"the tokenizer has no end-of-document token (eos_token is {eos_token!r})",
                where=where,
                fix='name one of its tokens as "eos_token" in tokenizer_config.json',
            )
        self.eod = eod
        self.bos = ids.get(bos_token) if bos_token else None
        self.pad = ids.get(pad_token, NO_PAD) if pad_token else NO_PAD
        if self.pad == self.eod:
            warnings.warn(
                f"{where}: pad and end of document are the same token {eos_token!r}; padding by it would mask the loss "
                "on every end of document, so it is not used as pad",
                stacklevel=3,
            )
            self.pad = NO_PAD
        self.identity = "tokenizers:" + hashlib.sha256(vocabulary.encode()).hexdigest()
        added = {token_id: token for token_id, token in fast.get_added_tokens_decoder().items() if token.special}
        self.special_ids, special = frozenset(added), {token.content for token in added.values()}
        longest_first = sorted(special, key=lambda text: (-len(text), text))
        self._special = re.compile("|".join(map(re.escape, longest_first))) if special else None

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        _utf8(text)
        add = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        if not self.places:
            return self._fast.encode_batch_fast([text], add_special_tokens=add)[0].ids
        return self._fast.encode(text, add_special_tokens=add).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def spellings(self) -> Mapping[str, int]:
        return self._fast.get_vocab(with_added_tokens=True)

    def word(self, token: int) -> tuple[str, str]:
        """(Spelling of an id in the vocabulary, its text); empty if only the model has the id."""
        spelling = self._fast.id_to_token(token)
        return ("", "") if spelling is None else (spelling, self._fast.decode([token], skip_special_tokens=False))

    def spelled(self, text: str) -> Mapping[str, int]:
        return collections.Counter(self._special.findall(text)) if self._special else {}


class HuggingFaceTokenizer(_FastTokenizer):
    """A Hugging Face model's folder: `tokenizer.json`, and the files beside it (`data/tokenizer_files`).

    Args:
        folder: has `tokenizer.json` (and usually `tokenizer_config.json`), or is the path of a `tokenizer.json`.
        add_special_tokens: whether `tokenize` adds the special tokens of the model family, e.g. Llama's begin-of-text.
            On by default, as in Megatron and Hugging Face.
        split_special_tokens: whether "<|endoftext|>" in a text is read as letters, as it must be in a document. False
            reads it as the token, for prompts and the output of a template; None follows the folder, as Hugging Face
            does: its `split_special_tokens`, else False.

    Raises:
        ConfigError: no such file, a broken one, or one without an end-of-document token.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = True,
    ) -> None:
        folder = os.fspath(folder)
        files = read_tokenizer(folder)
        split = files.split_special_tokens if split_special_tokens is None else split_special_tokens
        super().__init__(files.fast, files.named, folder, split, files.vocabulary)
        self._add_special_tokens = add_special_tokens
        self.chat_template = files.chat_template
        self._folder = folder

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation in the form of the model's template; tokenize it with `add_special_tokens=False`.

        Args:
            messages: each with "role" ("system", "user", "assistant") and "content".
            add_generation_prompt: end with the words that open the model's answer.

        Raises:
            ConfigError: there is no template, it is broken, or it refuses the conversation.
        """
        if self.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template (chat_template.jinja, or chat_template of tokenizer_config.json)",
                where=self._folder,
                fix="the folder of a model for conversations has one; a base model continues a plain prompt",
            )
        return render(self.chat_template, messages, self.named, add_generation_prompt, where=self._folder)


class GPT2BPETokenizer(_FastTokenizer):
    """GPT-2's original pair of files, `vocab.json` and `merges.txt`.

    Raises:
        ConfigError: a missing or broken file, or a vocabulary without `<|endoftext|>`.
    """

    def __init__(
        self,
        vocab_file: str | os.PathLike[str],
        merge_file: str | os.PathLike[str],
        split_special_tokens: bool | None = True,
    ) -> None:
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
        fast = byte_level(model)
        if fast.token_to_id(END_OF_TEXT) is not None:
            fast.add_special_tokens([END_OF_TEXT])
        named = {"eos_token": END_OF_TEXT}
        super().__init__(fast, named, os.fspath(vocab_file), bool(split_special_tokens), fast.to_str())


# type -> (class, the arguments it needs, those it may be given)
TOKENIZERS: dict[str, tuple[Callable[..., Tokenizer], tuple[str, ...], tuple[str, ...]]] = {
    "NullTokenizer": (NullTokenizer, ("vocab_size",), ()),
    "HuggingFaceTokenizer": (
        HuggingFaceTokenizer,
        ("tokenizer_model",),
        ("add_special_tokens", "split_special_tokens"),
    ),
    "GPT2BPETokenizer": (GPT2BPETokenizer, ("vocab_file", "merge_file"), ("split_special_tokens",)),
    "ByteLevelTokenizer": (ByteTokenizer, (), ()),
}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    vocab_file: str | os.PathLike[str] | None = None,
    merge_file: str | os.PathLike[str] | None = None,
    add_special_tokens: bool | None = None,
    split_special_tokens: bool | None = None,
) -> Tokenizer:
    """The tokenizer of Megatron's flags, and of two of Hugging Face's; see the table of this module.

    Raises:
        ConfigError: an unknown type, a missing argument, or one that contradicts the type.
    """
    if tokenizer_type not in TOKENIZERS:
        near = did_you_mean(tokenizer_type, TOKENIZERS) or f"one of {', '.join(TOKENIZERS)};"
        fix = f"{near} a SentencePiece or tiktoken model is read once it is exported as tokenizer.json"
        raise ConfigError(f"unknown tokenizer_type {tokenizer_type!r}", fix=fix)
    make, needs, takes = TOKENIZERS[tokenizer_type]
    given: dict[str, Any] = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file}
    given |= {"add_special_tokens": add_special_tokens, "split_special_tokens": split_special_tokens}
    for name, value in given.items():
        if value is not None and name not in (*needs, *takes):
            raise ConfigError(f"{tokenizer_type} takes no {name}, but it is {value!r}", fix="drop it")
    given["vocab_size"] = vocab_size
    for name in needs:
        if given[name] is None:
            raise ConfigError(f"{tokenizer_type} needs {name}", fix=f"give --{name.replace('_', '-')}")
    options = {name: given[name] for name in takes if given[name] is not None}
    tokenizer = make(*(given[name] for name in needs), **options)
    if vocab_size is not None and "vocab_size" not in needs and vocab_size != tokenizer.vocab_size:
        what = f"vocab_size is {vocab_size}, but this {tokenizer_type} has {tokenizer.vocab_size} tokens"
        raise ConfigError(what, fix="drop --vocab-size; the tokenizer knows")
    return tokenizer


def byte_level(model: models.Model) -> FastTokenizer:
    fast = FastTokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


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
