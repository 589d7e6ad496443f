"""A request, and the sequences that answer it: plain data, no tensor.

    Request    what somebody asked for; it never changes
    Sequence   one answer to it under way: `n` of them where n answers were asked for
    Output     what a step has added to a sequence

`Sequence.computed` counts the tokens whose keys and values lie in pages. A token that was drawn is not computed until
the next step takes it in, so a sequence that generates has `computed == len(tokens) - 1` between steps. That one number
says what a step must do: the same rule serves a prompt, a chunk of a prompt, one token, a few proposed ones behind it,
and a sequence that was preempted and begins anew.

Megatron-LM: `megatron/core/inference/inference_request.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.sampling import GREEDY, SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence is over; the values are OpenAI's words, and two of ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        prompt: ids, at least one.
        max_new_tokens: at most so many; 0 where only the prompt is scored.
        sampling: how tokens are drawn.
        stop_ids: ids that end a sequence; the id itself belongs to the answer.
        min_new_tokens: before so many tokens are there, no stop id is drawn.
        seed: of the draws; token i of answer j depends on (seed, j, i) alone.
        n: how many answers.
        log_probs: None for none; k for that of each token and of the k most likely ones in its place.
        prompt_log_probs: the same for the prompt's tokens, from `prompt_log_probs_start` on.
        prompt_log_probs_start: the first of them; the second token is 1, and the first has none before it.
        raw_log_probs: of softmax(l), in place of softmax(l / T).
        salt: requests with different salts share no pages: an adapter's name, a tenant.
        grammar: that every answer keeps to, see `inference/grammar.of_json_schema`; "" for none.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    seed: int = 0
    n: int = 1
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    prompt_log_probs_start: int = 1
    raw_log_probs: bool = False
    salt: str = ""
    grammar: str = ""


Ranked = tuple[tuple[int, float], ...]  # (id, log-probability), the most likely first


@dataclasses.dataclass(eq=False)
class Sequence:
    """One answer under way.

    Attributes:
        request, request_id: what it answers.
        index: which of the request's n answers.
        arrival: number of the request; (arrival, index) is the order of arrival, which decides who goes first.
        tokens: prompt and answer.
        computed: how many of them lie in pages.
        pages: the pages of tokens 0, 1, ...: token j is in page j // page_size.
        slot: of what layers keep for a sequence; 0 while it has none.
        log_probs: of each token of the answer; top: the most likely ones in its place.
        prompt_log_probs: of each token of the prompt that is scored, in answer 0 alone; prompt_top: as above.
        reason: why it is over; None while it is not.
        preemptions: how often it has lost its pages.
        weight_version: of the weights that have made its last token.
        failure: of a grammar's parser, in words, where `reason` is ERROR.
        proposed: tokens that the step under way verifies behind its newest (`inference/speculative.py`).
        cached: how many tokens its pages held already when it was last admitted.
        looked_at, parent: see `BlockManager.remember`.
    """

    request: Request
    request_id: str
    index: int
    arrival: int
    tokens: list[int]
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int = 0
    log_probs: list[float] = dataclasses.field(default_factory=list)
    top: list[Ranked] = dataclasses.field(default_factory=list)
    prompt_log_probs: list[float] = dataclasses.field(default_factory=list)
    prompt_top: list[Ranked] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None
    failure: str = ""
    preemptions: int = 0
    weight_version: int = 0
    cached: int = 0
    looked_at: int = 0
    parent: int | tuple[int, str] = 0
    proposed: list[int] = dataclasses.field(default_factory=list)
    lag: int = 0  # computed tokens that the draft model has not computed
    draft_length: Any = dataclasses.field(default=None, repr=False)  # how many tokens are proposed to it
    lookup: Any = dataclasses.field(default=None, repr=False)  # n-grams of its tokens
    grammar: Any = dataclasses.field(default=None, repr=False)  # where it stands in its request's

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are not computed yet: at least one as long as it is not over."""
        return len(self.tokens) - self.computed

    @property
    def findable(self) -> list[int]:
        """The tokens whose pages may be another's: all before the first that is still to be scored."""
        if self.request.prompt_log_probs is None:
            return self.tokens
        return self.tokens[: self.request.prompt_log_probs_start + len(self.prompt_log_probs)]

    @property
    def most_tokens(self) -> int:
        """As many as it can become."""
        return self.prompt_length + self.request.max_new_tokens

    def append(self, token: int) -> None:
        """A token was drawn; `reason` says whether that is the end."""
        self.tokens.append(token)
        if token in self.request.stop_ids:
            self.reason = FinishReason.STOP
            return
        if self.grammar is not None:
            self.grammar.take(token)
            self.failure = self.grammar.failure
        if self.failure:
            self.reason = FinishReason.ERROR
        elif self.grammar is not None and self.grammar.over:
            self.reason = FinishReason.STOP
        elif len(self.tokens) >= self.most_tokens:
            self.reason = FinishReason.LENGTH


@dataclasses.dataclass(frozen=True)
class Output:
    """What a step has added to a sequence.

    Attributes:
        request_id, index: which sequence.
        tokens: the new ids.
        log_probs, top: of each, where asked for.
        reason: why it is over, None while it is not.
        weight_version: of the weights that have made them.
        failure: what went wrong, where that is known in words.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    top: tuple[Ranked, ...]
    reason: FinishReason | None
    weight_version: int = 0
    failure: str = ""


def check_request(request: Request, request_id: str, vocab_size: int) -> None:
    """Refuse what could not be computed.

    Raises:
        ConfigError: nothing to generate, a number out of its range, or a stop id outside of the vocabulary.
        DataError: an id outside the vocabulary.
    """
    scores = request.prompt_log_probs is not None
    if request.max_new_tokens < (0 if scores and request.n == 1 else 1) or request.n < 1:
        raise ConfigError(
            f"max_new_tokens is {request.max_new_tokens} and n is {request.n}",
            fix="at least 1 of each; no new token where one prompt's log-probabilities are asked for",
        )
    if scores and request.prompt and not 1 <= request.prompt_log_probs_start <= len(request.prompt):
        raise ConfigError(
            f"prompt_log_probs_start is {request.prompt_log_probs_start}, of a prompt of {len(request.prompt)} tokens",
            fix="from 1 on: the first token has none before it",
        )
    if not 0 <= request.min_new_tokens <= request.max_new_tokens:
        raise ConfigError(
            f"min_new_tokens is {request.min_new_tokens} and max_new_tokens is {request.max_new_tokens}",
            fix="from 0 to max_new_tokens",
        )
    for name in ("log_probs", "prompt_log_probs"):
        count = getattr(request, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise ConfigError(f"{name} is {count} in a vocabulary of {vocab_size}", fix="None, or how many to name")
    for stop_id in request.stop_ids:
        if not 0 <= stop_id < vocab_size:
            raise ConfigError(f"stop id {stop_id} is not in a vocabulary of {vocab_size}", fix="leave it out")
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise ConfigError(f"logit_bias of id {token}, in a vocabulary of {vocab_size}", fix="leave it out")
    place = next((i for i, token in enumerate(request.prompt) if not 0 <= token < vocab_size), None)
    if place is not None:
        raise DataError(
            f"token id {request.prompt[place]} is not in a vocabulary of {vocab_size}",
            where=f"{request_id}, token {place}",
            fix="the tokenizer that the model was trained with",
        )
