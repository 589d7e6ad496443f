"""Conversations as ids, and which of the ids the loss counts: those that the model itself would generate.

The problem in a sentence: a chat template is a program that turns messages into one text, the text becomes ids, and by
then nothing says which ids the assistant spoke.

A model that serves the conversation sees the text up to its turn, generates ids up to the stop token, and sees the
rest as somebody else's words. So the text is cut where the template itself opens and closes a turn:

    before = template(messages before the turn, with the words that open an answer)
    after  = template(messages with the turn)                      begins with `before`, or the template is refused

    <|user|> 2 + 2? <|end|> <|assistant|>  4 <|end|>  <|user|> and 3 + 3? <|end|> <|assistant|>  6 <|end|>
    '-------------- before --------------''- counts -''---------------- before ----------------''- counts -'

Each piece is tokenized by itself, as in a served conversation, where the prompt is tokenized and the answer was drawn
as ids. The first token of an answer counts, and the stop token counts: it is the first special token after the
content. What a template writes after the stop token (a newline) is part of the next prompt.

| refused, with the line of the file             | because                                                           |
|------------------------------------------------|-------------------------------------------------------------------|
| `after` does not begin with `before`           | the template changes earlier turns; no mask can be derived        |
| no special token after an answer               | the model would never learn to stop                               |
| a special token's text inside a message        | a message could end its own turn                                  |
| no message of the assistant                    | nothing would count                                               |

Forms of a line: `{"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}`; `{"prompt": ..., "completion":
...}` as two texts, which are joined and ended by the end-of-document token, or as two lists of messages, of which the
completion's count; for preferences `{"prompt": ..., "chosen": ..., "rejected": ...}` in either form.

TRL: `trl/data_utils.py` (the same forms), `get_training_chat_template` in `trl/chat_template_utils.py`, which replaces
templates that have no `{% generation %}` marks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minimegatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from minimegatron.data.tokenizer_files import render
from minimegatron.errors import ConfigError, DataError

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A sequence of ids.

    Attributes:
        ids: the ids.
        counts: for each id whether the loss counts it as a label.
    """

    ids: tuple[int, ...]
    counts: tuple[bool, ...]

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.ids + other.ids, self.counts + other.counts)

    def cut(self, most: int) -> Tokens:
        """The first `most` ids."""
        return Tokens(self.ids[:most], self.counts[:most])


class Template:
    """A chat template with its tokenizer.

    Args:
        tokenizer: reads special tokens in a text as tokens (`split_special_tokens=False`).
        source: Jinja; default the tokenizer's.
        where: names it in messages of errors.

    Raises:
        ConfigError: there is no template.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, source: str | None = None, where: str = "") -> None:
        source = source if source is not None else tokenizer.chat_template
        if source is None:
            raise ConfigError(
                "conversations need a chat template, and the tokenizer has none",
                where=where,
                fix="--chat-template FILE.jinja, or lines with `prompt` and `completion` as texts",
            )
        self.tokenizer, self.source, self.where = tokenizer, source, where

    def text(self, messages: Messages, opens_answer: bool, tools: Any = None) -> str:
        """The conversation as the template writes it."""
        return render(self.source, messages, self.tokenizer.named, opens_answer, where=self.where, tools=tools)

    def ids(self, text: str) -> list[int]:
        """The ids of a piece of the template's text."""
        return self.tokenizer.tokenize(text, add_special_tokens=False) if text else []

    def encode(self, messages: Messages, first: int = 0, tools: Any = None) -> Tokens:
        """The ids of a conversation; the assistant's turns from message `first` on count.

        Raises:
            DataError: see the table of this module.
        """
        self._check_contents(messages)
        sequence, written = Tokens((), ()), ""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not turns:
            raise DataError("no message of the assistant: nothing would count", fix="drop the line, or add an answer")
        for turn in turns:
            before = self.text(messages[:turn], True, tools)
            after = self.text(messages[: turn + 1], False, tools)
            if not before.startswith(written) or not after.startswith(before):
                raise DataError(
                    f"the chat template writes the conversation before turn {turn} differently once the turn is there: "
                    "which tokens are the assistant's cannot be derived",
                    where=self.where,
                    fix="--chat-template FILE.jinja with a template that only appends; or one answer a line",
                )
            answer = self.ids(after[len(before) :])
            end = next((i + 1 for i, token in enumerate(answer) if token in self.tokenizer.special_ids), None)
            if end is None:
                raise DataError(
                    "the chat template writes no special token after an answer: the model would never learn to stop",
                    where=self.where,
                    fix="--chat-template FILE.jinja with a template that ends an answer by a special token",
                )
            sequence += _prompt(self.ids(before[len(written) :])) + _answer(answer[:end])
            written, rest = after, answer[end:]
            sequence += _prompt(rest)
        return sequence if not rest else sequence.cut(len(sequence.ids) - len(rest))

    def _check_contents(self, messages: Messages) -> None:
        for number, message in enumerate(messages):
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content)
            found = self.tokenizer.spelled(text)
            if found:
                raise DataError(
                    f"message {number} has the text of the special token {next(iter(found))!r}: it would end its turn",
                    fix="remove it from the message",
                )


def _prompt(ids: Sequence[int]) -> Tokens:
    return Tokens(tuple(ids), (False,) * len(ids))


def _answer(ids: Sequence[int]) -> Tokens:
    return Tokens(tuple(ids), (True,) * len(ids))


class Encoder:
    """Lines of JSONL as ids.

    Args:
        tokenizer: the tokenizer.
        template: the chat template; None if every line has texts.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template | None) -> None:
        self.tokenizer, self._template = tokenizer, template

    @property
    def template(self) -> Template:
        if self._template is None:
            raise ConfigError(
                "a line has messages, and the tokenizer has no chat template",
                fix="--chat-template FILE.jinja, or lines with texts",
            )
        return self._template

    def conversation(self, line: Mapping[str, Any]) -> list[Tokens]:
        """The sequence of a line for supervised fine-tuning.

        Raises:
            DataError: the line has another form.
        """
        if "messages" in line:
            return [self.template.encode(_messages(line, "messages"), tools=line.get("tools"))]
        if {"prompt", "completion"} <= line.keys():
            return [self.joined(line, "completion")]
        raise _no_form(line, "`messages`, or `prompt` and `completion`")

    def pair(self, line: Mapping[str, Any]) -> list[Tokens]:
        """The chosen and the rejected sequence of a line.

        Raises:
            DataError: the line has another form, or both answers are equal.
        """
        if not {"chosen", "rejected"} <= line.keys():
            raise _no_form(line, "`prompt`, `chosen` and `rejected`")
        chosen, rejected = (self.joined(line, name) for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise DataError("the chosen and the rejected answer are the same", fix="drop the line")
        return [chosen, rejected]

    def prompt(self, line: Mapping[str, Any]) -> list[int]:
        """The ids that a model continues: of a line's `prompt`, messages or text."""
        if isinstance(line.get("prompt"), str):
            return list(self.tokenizer.tokenize(line["prompt"]))
        template = self.template
        return template.ids(template.text(_messages(line, "prompt"), True, line.get("tools")))

    def joined(self, line: Mapping[str, Any], answer: str) -> Tokens:
        """The line's `prompt` and the answer under a key, both as texts or both as messages.

        Without a prompt, as messages: the last turn is the answer.
        """
        if isinstance(line[answer], str) and isinstance(line.get("prompt"), str):
            tokenizer = self.tokenizer
            text = line[answer]
            if isinstance(tokenizer, HuggingFaceTokenizer):  # its beginning of a text belongs to the prompt
                ids = tokenizer.tokenize(text, add_special_tokens=False)
            else:
                ids = list(tokenizer.tokenize(text))
            return _prompt(tokenizer.tokenize(line["prompt"])) + _answer([*ids, tokenizer.eod])
        before = _messages(line, "prompt") if "prompt" in line else []
        said = [*before, *_messages(line, answer)]
        return self.template.encode(said, len(before) or len(said) - 1, line.get("tools"))


def _messages(line: Mapping[str, Any], key: str) -> Messages:
    found = line.get(key)
    if not isinstance(found, list) or not found:
        raise DataError(
            f"`{key}` is {type(found).__name__}, not a list of messages", fix='[{"role": ..., "content": ...}]'
        )
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"a message of `{key}` has no role: {json.dumps(message)[:80]}", fix='{"role": "user", ...}'
            )
    return found


def _no_form(line: Mapping[str, Any], wanted: str) -> DataError:
    return DataError(f"a line with the keys {', '.join(map(repr, line)) or 'none'}", fix=f"give {wanted}")
