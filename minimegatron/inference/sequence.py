"""A request, and the sequences that answer it: plain data, no tensor.

    Request    prompt and sampling parameters; immutable
    Sequence   one answer under way; a request has n of them
    Output     what a step added to a sequence

`Sequence.computed` counts the tokens whose keys and values are in pages. A drawn token is computed by the next step, so
a decoding sequence has `computed == len(tokens) - 1` between steps. What is left to compute is `tokens[computed:]`, for
a prompt, a chunk of it, one new token, or a preempted sequence alike.

Megatron-LM: `megatron/core/inference/inference_request.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from minimegatron.data.pictures import Picture, SeenPrompt
from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.sampling import GREEDY, SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence is finished: OpenAI's "stop" and "length"; "abort" and "error" are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how to answer it.

    Args:
        prompt: ids, at least one.
        max_new_tokens: most tokens of an answer; 0 if only the prompt is scored.
        sampling: how tokens are drawn.
        stop_ids: ids that end an answer; the id itself is its last token.
        min_new_tokens: no stop id is drawn before the answer has so many tokens.
        seed: of the draws; the random number of token i of answer j depends on (seed, j, i) alone.
        n: number of answers.
        log_probs: None: none; k: for each new token its log-probability, and the k most likely tokens with theirs.
        prompt_log_probs: the same for the prompt's tokens, from `prompt_log_probs_start` on.
        prompt_log_probs_start: index of the first prompt token scored, at least 1: token 0 has no logits before it.
        raw_log_probs: log-probabilities of softmax(logits), in place of softmax(logits / T).
        salt: requests with different salts share no pages, e.g. those of different tenants.
        grammar: that every answer matches, see `inference/grammar.of_json_schema`; "" for none.
        adapter: name of the engine's adapter that answers (`layers/loras`); "" for none. Requests with different ones
            share no pages.
        pictures: in the order of the prompt's picture tokens, of which it has as many as they need
            (`data/picture_messages`). Requests with different ones share no pages.
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
    adapter: str = ""
    pictures: tuple[Picture, ...] = ()

    @property
    def root(self) -> str:
        """The salt, and what the prompt's ids do not say: which pictures they stand for."""
        return self.salt if not self.pictures else repr((self.salt, self.pictures))


Ranked = tuple[tuple[int, float], ...]  # (id, log-probability), the most likely first


@dataclasses.dataclass(eq=False)
class Sequence:
    """One answer under way.

    Attributes:
        request, request_id: the request it answers.
        index: which of the request's n answers.
        arrival: number of the request; (arrival, index) is the scheduler's order.
        tokens: prompt and answer.
        computed: number of tokens whose keys and values are in pages.
        pages: its block table: token j is in page pages[j // page_size].
        slot: its slot in the cache; 0 while it has none.
        log_probs, top: of each token of the answer: its log-probability, the most likely tokens.
        prompt_log_probs, prompt_top: the same of the scored prompt tokens; answer 0 alone has them.
        reason: why it is finished; None while it is not.
        preemptions: number of its preemptions.
        weight_version: version of the weights that drew its last token.
        failure: the grammar parser's error, if `reason` is ERROR because of it.
        proposed: tokens proposed to follow its newest in the current step (`inference/speculative.py`).
        cached: number of tokens found in the prefix cache when it was last admitted.
        looked_at, parent: see `BlockManager.remember`.
        lag: computed tokens that the draft model has not computed.
        draft_length, lookup: `speculative.DraftLength`, and `speculative.NGrams` of its tokens.
        grammar: its parser state, `grammar.GrammarState`.
        seen: the prompt with its pictures; None without.
        source: so many tokens of the prompt, its first ones, an encoder reads; 0 without one.
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
    parent: int | tuple[int, str, str] = 0
    proposed: list[int] = dataclasses.field(default_factory=list)
    lag: int = 0
    draft_length: Any = dataclasses.field(default=None, repr=False)
    lookup: Any = dataclasses.field(default=None, repr=False)
    grammar: Any = dataclasses.field(default=None, repr=False)
    seen: SeenPrompt | None = dataclasses.field(default=None, repr=False)
    source: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def continued(self) -> tuple[int, ...]:
        """The tokens of the prompt that the answer continues: all but a source."""
        return self.request.prompt[self.source :]

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens that are not computed yet; at least one until it is finished."""
        return len(self.tokens) - self.computed

    @property
    def findable(self) -> list[int]:
        """The tokens that may be found in cached pages: not those whose logits are still needed for scores."""
        if self.request.prompt_log_probs is None:
            return self.tokens
        return self.tokens[: self.request.prompt_log_probs_start + len(self.prompt_log_probs)]

    @property
    def most_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.prompt_length + self.request.max_new_tokens

    def append(self, token: int) -> None:
        """Append a drawn token; sets `reason` if it ends the answer."""
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
    """What a step added to a sequence.

    Attributes:
        request_id, index: of the sequence.
        tokens: the new ids.
        log_probs, top: of each, where asked for.
        reason: why the sequence is finished; None while it is not.
        weight_version: version of the weights that drew the tokens.
        failure: the grammar parser's error, if `reason` is ERROR because of it.
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
    """Refuse a request with invalid values.

    Raises:
        ConfigError: nothing to generate, a number out of range, or a stop id outside the vocabulary.
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
