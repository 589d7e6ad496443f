"""How likely a model finds a text, and which of several answers it finds likeliest.

The problem in a sentence: a loss depends on the tokenizer and on how a text is cut into windows, so it compares nothing
until both are named.

**A text.** Its tokens are predicted window after window; the first one from the prefix, the token that begins a text.
With a model of L positions and a stride S, a window predicts S tokens and reads as many before them as fit:

    S = L (the default)     |p 0 1 2 ... L-1|  |L-1 L ... 2L-1|      each token once, few of them with a whole context
    S < L                   |p ... S-1|  |... S ... 2S-1|            L / S times the work, >= L - S tokens before each

    loss = - sum log p / tokens        perplexity = exp(loss)        bits per byte = - sum log2 p / bytes of UTF-8

**An encoder-decoder** predicts tokens from those before them as well: the encoder reads the context of a window, the
decoder predicts its S tokens, and each has L positions (prefix language modelling; not span corruption, in which the
encoder reads on both sides of what is hidden). S = L is the default here, too, and leaves L tokens before each window:

    S = L     source |p|  target |0 1 ... L-1|     source |0 ... L-1|  target |L ... 2L-1|

Perplexities of two tokenizers are of different tokens; bits per byte compare.

**Choices.** A question and an answer are one text; the answer's log-probability is the sum over its tokens. `acc` takes
the likeliest answer, `acc_norm` the likeliest for each of its characters, which does not favour short answers. Tokens
at the seam: the ids of an answer are those of the whole text, without as many as the question alone has. The encoder of
an encoder-decoder reads the question, and its end; the decoder predicts the answer, whose ids are its own.

As lm-evaluation-harness counts (`acc`, `acc_norm`, `loglikelihood_rolling` with a context of one token).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from minimegatron.config import TransformerConfig
from minimegatron.errors import DataError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.sampling import SamplingParams
from minimegatron.inference.sequence import Request
from minimegatron.inference.sequence import Sequence as Answer


class Tokenizer(Protocol):
    """What is needed of a tokenizer: see `data.tokenizer.HuggingFaceTokenizer`."""

    eod: int
    bos: int | None

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a text."""
        ...


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of given tokens.

    Attributes:
        log_prob: the sum of their log-probabilities, in nats.
        tokens: how many they are.
        greedy: each of them is the likeliest one at its place.
    """

    log_prob: float
    tokens: int
    greedy: bool

    @classmethod
    def of(cls, answer: Answer) -> Likelihood:
        """Of the scored tokens of a request made by `scored`."""
        wanted = answer.request.prompt[answer.request.prompt_log_probs_start :]
        greedy = all(top[0][0] == token for top, token in zip(answer.prompt_top, wanted, strict=True))
        return cls(math.fsum(answer.prompt_log_probs), len(wanted), greedy)


def engine_of(model: Any, max_num_seqs: int = 32) -> Engine:
    """An engine for texts as long as the model's positions: one token more, which is predicted and not read.

    Where positions are learned the engine reads that token, too, and a window has one token less. Of an encoder-decoder
    each half has the positions.
    """
    config = model.config
    learned, halves = config.position_embedding_type == "learned_absolute", len(config.prompt_of([])) + 1
    longest = config.max_position_embeddings * halves + (not learned)
    return Engine(model, EngineConfig(longest, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(2048, longest)))


def scored(ids: Sequence[int], start: int) -> Request:
    """A request for the log-probabilities of ids[start:]."""
    return Request(tuple(ids), 0, SamplingParams(1.0), prompt_log_probs=1, prompt_log_probs_start=start)


class Rows:
    """What of a text fits into a request, and how it is divided.

    Args:
        config: the model.
        longest: ids of a row, read and predicted ones together: `max_model_len` of an engine.

    Attributes:
        halves: an encoder reads what is before the predicted ids; its half of a row is as long as the decoder's.
        room: ids of a text that a row has.
        most: ids that a row can predict; by default a window predicts so many.
    """

    def __init__(self, config: TransformerConfig, longest: int) -> None:
        between = len(config.prompt_of([]))  # an encoder-decoder has one more, with which a target begins
        self.config, self.halves, self.room = config, between > 0, longest - between
        self.most = self.room // 2 if self.halves else self.room - 1

    def context(self, count: int) -> int:
        """Most ids before `count` others; 0 or less if these do not fit."""
        return min(self.room - count, self.most) if self.halves else self.room - count

    def scored(self, before: Sequence[int], added: Sequence[int]) -> Request:
        """A request for the log-probabilities of `added`."""
        prompt = self.config.prompt_of(before)
        return scored([*prompt, *added], len(prompt))


def prefix(tokenizer: Tokenizer) -> int:
    """The id that begins a text: the tokenizer's, else its end of document."""
    return tokenizer.eod if tokenizer.bos is None else tokenizer.bos


def windows(length: int, longest: int, stride: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(begin, start, end) of each window of ids[0:length]: it reads from `begin`, and predicts ids[start:end].

    Args:
        length: of all ids, the prefix among them.
        longest: ids of a window, read and predicted ones together; at least 2.
        stride: ids that a window predicts; default all but the first.

    Raises:
        DataError: a stride below 1, or of as many ids as a window has.
    """
    stride = longest - 1 if stride is None else stride
    if not 1 <= stride < longest:
        raise DataError(
            f"a stride of {stride} tokens", fix=f"at least 1, and at most {longest - 1}, the model's length"
        )
    for start in range(1, length, stride):
        end = min(start + stride, length)
        yield max(0, end - longest), start, end


def text_requests(
    text: str, tokenizer: Tokenizer, rows: Rows, stride: int | None = None, window: int | None = None
) -> list[Request]:
    """The windows of a text, see the module.

    Args:
        text, tokenizer: the text, and what reads it.
        rows: of the model.
        stride: ids that a window predicts; default as many as a row can.
        window: ids of a window; default all that a row has.

    Raises:
        DataError: an empty text, or a stride that does not fit.
    """
    first = prefix(tokenizer)
    ids = tokenizer.tokenize(text)
    if not ids:
        raise DataError("the text has no token", fix="a text with some")
    ids = [first, *ids]
    cut = windows(len(ids), window or rows.room, rows.most if stride is None else stride)
    return [rows.scored(ids[begin:start], ids[start:end]) for begin, start, end in cut]


def pair_ids(context: str, answer: str, tokenizer: Tokenizer, halves: bool = False) -> tuple[list[int], list[int]]:
    """The ids of a context, and those that the answer adds to it; spaces at the context's end belong to the answer.

    Args:
        context, answer, tokenizer: the texts, and what reads them.
        halves: the context is a text of its own, which an encoder reads to its end.

    Raises:
        DataError: the answer adds no token.
    """
    kept = context.rstrip()
    context, answer = kept, context[len(kept) :] + answer
    if not context:
        added = tokenizer.tokenize(answer, add_special_tokens=False)
        first = prefix(tokenizer)
        before, added = ([first], added) if added[:1] != [first] else (added[:1], added[1:])
    elif halves:
        before, added = tokenizer.tokenize(context), tokenizer.tokenize(answer, add_special_tokens=False)
        before += [tokenizer.eod] * (before[-1:] != [tokenizer.eod])
    else:
        before = tokenizer.tokenize(context)
        added = tokenizer.tokenize(context + answer)[len(before) :]
    if not added or not before:
        raise DataError(f"{answer!r} adds no token to its context", fix="an answer with some text")
    return before, added


def pair_request(before: Sequence[int], added: Sequence[int], rows: Rows) -> Request:
    """A request for the log-probabilities of `added`; what does not fit before it is left out, from the left.

    Raises:
        DataError: `added` alone does not fit.
    """
    if len(added) > rows.most:
        raise DataError(f"an answer of {len(added)} tokens, and at most {rows.most} fit", fix="a shorter answer")
    return rows.scored(before[-rows.context(len(added)) :], added)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with answers to choose from.

    Attributes:
        question: the text before an answer, and a space.
        choices: the answers, at least two.
        answer: number of the right one, from 0.
    """

    question: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """The lines {"question": text, "choices": [text, ...], "answer": number from 0} of a file.

    Raises:
        DataError: it cannot be read, or has no such line, or another one.
    """
    wanted = 'a line {"question": "...", "choices": ["...", "..."], "answer": 0} each'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"no questions can be read: {error}", where=str(path), fix="a file of UTF-8 text") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            data: Any = json.loads(line)
            question, choices, answer = data["question"], tuple(data["choices"]), data["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"no question: {error}", where=f"{path}, line {number}", fix=wanted) from error
        texts = all(isinstance(text, str) and text for text in (question, *choices))
        if not texts or len(choices) < 2 or isinstance(answer, bool) or answer not in range(len(choices)):
            what = f"{len(choices)} choices, and the answer is {answer!r}" if texts else "a text is empty or no text"
            raise DataError(what, where=f"{path}, line {number}", fix=wanted)
        found.append(Question(question, choices, answer))
    if not found:
        raise DataError("no question in it", where=str(path), fix=wanted)
    return found


def question_requests(questions: Sequence[Question], tokenizer: Tokenizer, rows: Rows) -> list[Request]:
    """A request for each choice of each question, in order.

    Raises:
        DataError: see `pair_ids` and `pair_request`.
    """
    pairs = [(each.question, f" {choice}") for each in questions for choice in each.choices]
    return [pair_request(*pair_ids(question, choice, tokenizer, rows.halves), rows) for question, choice in pairs]


def text_report(likelihoods: Sequence[Likelihood], text: str) -> dict[str, float]:
    """Figures of a text from its windows: `tokens`, `bytes`, `loss`, `perplexity`, `bits per byte`."""
    log_prob, tokens = math.fsum(each.log_prob for each in likelihoods), sum(each.tokens for each in likelihoods)
    nbytes, loss = len(text.encode()), -log_prob / tokens
    return {
        "tokens": tokens,
        "bytes": nbytes,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits per byte": -log_prob / math.log(2) / nbytes,
    }


def question_report(questions: Sequence[Question], likelihoods: Sequence[Likelihood]) -> dict[str, float]:
    """`questions`, `acc` and `acc_norm` with their standard errors, and `chance`, the share that guessing gets."""
    left, right, normed = list(likelihoods), [], []
    for each in questions:
        scores, left = [one.log_prob for one in left[: len(each.choices)]], left[len(each.choices) :]
        by_length = [score / len(choice) for score, choice in zip(scores, each.choices, strict=True)]
        right.append(scores.index(max(scores)) == each.answer)
        normed.append(by_length.index(max(by_length)) == each.answer)
    n, found = len(questions), {"questions": float(len(questions))}
    for name, hits in (("acc", right), ("acc_norm", normed)):
        mean = sum(hits) / n
        found[name] = mean
        found[f"{name}_stderr"] = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else math.nan
    return found | {"chance": sum(1 / len(each.choices) for each in questions) / n}
