"""From pieces of text to OpenAI's responses: whole, or as server-sent events.

    Piece --> Choice --> {"choices": [...], "usage": ...}          whole, at the end
                     --> data: {"choices": [one]}                  for each piece with text, log-probs or an end
                         data: {"choices": [], "usage": ...}       with `include_usage`
                         data: [DONE]

**Log-probabilities** are of the model's own logits, without temperature and penalties, for every token drawn, the stop
id included. A token is named by its text, or as `bytes:\\xe2\\x82` if it is a part of a character. Probability 0 is
`LEAST`, since JSON has no infinity.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.inference.detokenizer import token_bytes
from minimegatron.inference.sequence import Ranked
from minimegatron.serving.engine_thread import Piece, Stream
from minimegatron.serving.protocol import ChatRequest, CompletionRequest

LEAST = -9999.0
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Tokens:
    """Names and bytes of single tokens, cached.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self.tokenizer = tokenizer
        self.named: Callable[[int], tuple[str, bytes]] = functools.lru_cache(1 << 16)(self._named)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; an id of the vocabulary's padding has none."""
        size = self.tokenizer.vocab_size
        return self.tokenizer.detokenize([token for token in ids if token < size])

    def _named(self, token: int) -> tuple[str, bytes]:
        spelling, text = self.tokenizer.word(token)
        found = token_bytes(spelling, text)
        try:
            return found.decode(), found
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found


@dataclasses.dataclass
class Choice:
    """An answer so far.

    Attributes:
        index: of the choice in the response.
        text: of the answer; with `echo` the prompt before it.
        log_probs: OpenAI's entry for each token.
        drawn: log-probabilities of the drawn tokens; mean: theirs, which `best_of` ranks by.
        tokens: number of drawn tokens.
        reason: `finish_reason`; None while it goes on.
        offset: characters before the next token (`text_offset`).
    """

    index: int
    text: str = ""
    log_probs: list[Any] = dataclasses.field(default_factory=list)
    drawn: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    reason: str | None = None
    offset: int = 0

    @property
    def mean(self) -> float:
        return sum(self.drawn) / max(1, len(self.drawn))


class Format:
    """The response format of one endpoint.

    Args:
        body: the request.
        model: `model` of the response.
        tokens: names of tokens.
    """

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, body: CompletionRequest | ChatRequest, model: str, tokens: Tokens) -> None:
        self.body, self.tokens = body, tokens
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def wants_log_probs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        raise NotImplementedError

    def entry(self, choice: Choice, token: int, log_prob: float | None, top: Ranked) -> Any:
        """The entry of one token; `log_prob` is None for the first token of an echoed prompt."""
        raise NotImplementedError

    def log_probs(self, entries: Sequence[Any]) -> Any:
        """The field `logprobs` from the entries of some tokens."""
        raise NotImplementedError

    def whole_choice(self, choice: Choice, log_probs: Any) -> dict[str, Any]:
        """The fields of a whole choice."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """The fields of a streamed part of a choice."""
        raise NotImplementedError

    def take(self, choice: Choice, piece: Piece) -> list[Any]:
        """Add a piece to a choice; returns the piece's entries of log-probabilities."""
        entries = []
        if self.wants_log_probs:
            for token, value, top in zip(piece.tokens, piece.log_probs, piece.top, strict=True):
                entries.append(self.entry(choice, token, value, top))
        choice.text += piece.text
        choice.log_probs += entries
        choice.drawn += piece.log_probs
        choice.tokens += len(piece.tokens)
        choice.reason = piece.reason
        return entries

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a response without `stream`."""
        shown = [
            {
                "index": choice.index,
                **self.whole_choice(choice, self.log_probs(choice.log_probs) if self.wants_log_probs else None),
                "finish_reason": choice.reason,
            }
            for choice in choices
        ]
        return {**self.head, "object": self.kind, "choices": shown, "usage": usage}

    def chunk(self, index: int, delta: dict[str, Any], entries: Sequence[Any], reason: str | None) -> bytes:
        """An event with a part of one choice."""
        log_probs = self.log_probs(entries) if self.wants_log_probs and entries else None
        choice = {"index": index, **delta, "logprobs": log_probs, "finish_reason": reason}
        return self._event([choice], None)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The event with the token counts, after all choices."""
        return self._event([], usage)

    def _event(self, choices: list[Any], usage: dict[str, Any] | None) -> bytes:
        counted = {"usage": usage} if self.body.include_usage else {}
        return event({**self.head, "object": self.chunk_kind, "choices": choices, **counted})


class CompletionFormat(Format):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    body: CompletionRequest

    @property
    def wants_log_probs(self) -> bool:
        return self.body.logprobs is not None

    def entry(self, choice: Choice, token: int, log_prob: float | None, top: Ranked) -> Any:
        name, found = self.tokens.named(token)
        shown = b"" if token in self.tokens.tokenizer.special_ids else found  # special ones are no text
        at, choice.offset = choice.offset, choice.offset + len(shown.decode(errors="ignore"))
        likely = {self.tokens.named(each)[0]: _finite(value) for each, value in top}
        if log_prob is not None:
            likely.setdefault(name, _finite(log_prob))
        return name, None if log_prob is None else _finite(log_prob), likely if log_prob is not None else None, at

    def log_probs(self, entries: Sequence[Any]) -> Any:
        names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        return {name: [entry[i] for entry in entries] for i, name in enumerate(names)}

    def whole_choice(self, choice: Choice, log_probs: Any) -> dict[str, Any]:
        return {"text": choice.text, "logprobs": log_probs}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def echo(self, choice: Choice, text: str, stream: Stream) -> list[Any]:
        """Put the prompt before an answer; returns the prompt's entries of log-probabilities."""
        entries: list[Any] = []
        if self.wants_log_probs:
            assert stream.answer is not None, "it has a piece"
            values = [None, *stream.answer.prompt_log_probs]
            tops: list[Ranked] = [(), *stream.answer.prompt_top]
            for token, value, top in zip(stream.request.prompt, values, tops, strict=True):
                entries.append(self.entry(choice, token, value, top))
        choice.text, choice.log_probs = text, list(entries)
        return entries


class ChatFormat(Format):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    body: ChatRequest

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.body.logprobs)

    def entry(self, choice: Choice, token: int, log_prob: float | None, top: Ranked) -> Any:
        assert log_prob is not None, "a drawn token has one"
        return {**self._one(token, log_prob), "top_logprobs": [self._one(each, value) for each, value in top]}

    def _one(self, token: int, log_prob: float) -> dict[str, Any]:
        name, found = self.tokens.named(token)
        return {"token": name, "logprob": _finite(log_prob), "bytes": list(found)}

    def log_probs(self, entries: Sequence[Any]) -> Any:
        return {"content": list(entries), "refusal": None}

    def whole_choice(self, choice: Choice, log_probs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": log_probs}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def first(self, index: int) -> bytes:
        """The event that begins a choice, with its role."""
        return self.chunk(index, {"delta": {"role": "assistant", "content": ""}}, (), None)


def usage_of(streams: Sequence[Stream], choices: Sequence[Choice]) -> dict[str, Any]:
    """The token counts; answers that `best_of` drops count too."""
    prompt, answer = sum(len(stream.request.prompt) for stream in streams), sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(stream.cached_tokens for stream in streams)},
    }


def _finite(value: float) -> float:
    return max(value, LEAST)
