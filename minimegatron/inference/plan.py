"""What the ranks compute in a step, in plain numbers: rank 0 makes it from what the scheduler has chosen, all read it.

    tokens      one row: the chunk of each sequence behind the other, and what is proposed behind a chunk
    wanted      places of the row whose logits are wanted: one for each draw, one for each prompt token to score
    draws       of each: which logits, sampling parameters, u
    scores      of each: which logits, which token

A sequence has one draw when its last token is computed, n at the end of its prompt where `n` answers are asked for,
and k + 1 where k tokens are proposed. A `Result` has the draws' and scores' outcomes in the same order.

Megatron-LM: `megatron/core/inference/contexts/dynamic_context.py` (there tensors that every rank makes itself).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence as Items

from minimegatron.inference.sampling import SamplingParams, uniform
from minimegatron.inference.scheduler import Chunk, Step
from minimegatron.inference.sequence import Ranked, Sequence


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A token that the draft model or a head has drawn, to be verified.

    Attributes:
        token: the id.
        at: (pass of the proposer in this step, row of its draws) where its distribution is.
        u: of the verdict, in [0, 1).
    """

    token: int
    at: tuple[int, int]
    u: float


@dataclasses.dataclass(frozen=True)
class Draw:
    """A token to draw.

    Attributes:
        at: which of the wanted logits.
        params: how.
        u: the draw, in [0, 1).
        banned: ids that may not be drawn.
        allowed: the only ids that may be (`grammar.unpacked`); None for all.
        history: (prompt, answer so far), where `params` penalises.
        log_probs: None, or how many of the most likely tokens to name beside the drawn one's log-probability.
        raw: log-probabilities of softmax(l) in place of softmax(l / T).
        proposal: what was drawn for this place from another distribution; None draws without.
    """

    at: int
    params: SamplingParams
    u: float = 0.0
    banned: tuple[int, ...] = ()
    history: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    log_probs: int | None = None
    raw: bool = False
    proposal: Proposal | None = None
    allowed: bytes | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """A token whose log-probability is asked for.

    Attributes:
        at: which of the wanted logits.
        token: the id.
        top: how many of the most likely ones to name.
        temperature: T of softmax(l / T).
    """

    at: int
    token: int
    top: int
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step in plain numbers; see `PagedCache.context` for the first five.

    Attributes:
        wanted: places in the row whose logits are wanted.
        copies, slot_copies: (from, to), before anything is computed.
        draft: number of the proposer's pass in this step; None is the model's own.
    """

    tokens: tuple[int, ...]
    new: tuple[int, ...]
    kept: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    wanted: tuple[int, ...]
    draws: tuple[Draw, ...] = ()
    scores: tuple[Score, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    slot_copies: tuple[tuple[int, int], ...] = ()
    draft: int | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step has made.

    Attributes:
        tokens: of each draw.
        log_probs, top: of each draw; NaN and nothing where not asked for.
        finite: whether its logits were numbers.
        scores: (log-probability, the most likely ones) of each score.
    """

    tokens: list[int]
    log_probs: list[float]
    top: list[Ranked]
    finite: list[bool]
    scores: list[tuple[float, Ranked]]


def scored_tokens(chunk: Chunk) -> int:
    """How many of a chunk's tokens predict a token of the prompt whose log-probability is asked for."""
    sequence = chunk.sequence
    if sequence.request.prompt_log_probs is None or sequence.index:
        return 0
    first = max(chunk.start, next_scored(sequence))
    return max(0, min(chunk.start + chunk.count, sequence.prompt_length - 1) - first)


def next_scored(sequence: Sequence) -> int:
    """The place whose logits say how likely the next token is that is to be scored."""
    return sequence.request.prompt_log_probs_start - 1 + len(sequence.prompt_log_probs)


def plan(step: Step, drafted: bool = False) -> Batch:
    """A step in plain numbers, for every rank.

    Args:
        step: the step; its sequences have what is proposed.
        drafted: it was drawn from a distribution, where it is not greedy.
    """
    tokens: list[int] = []
    wanted: list[int] = []
    draws: list[Draw] = []
    scores: list[Score] = []
    rows: collections.Counter[int] = collections.Counter()  # draws so far in each pass of the draft model
    for chunk in step.chunks:
        sequence, request = chunk.sequence, chunk.sequence.request
        at = len(tokens)
        tokens += sequence.tokens[chunk.start : chunk.start + chunk.count]
        if count := scored_tokens(chunk):
            first = next_scored(sequence)
            heat = 1.0 if request.raw_log_probs else request.sampling.temperature
            for j in range(first, first + count):
                scores.append(Score(len(wanted), request.prompt[j + 1], request.prompt_log_probs or 0, heat))
                wanted.append(at + j - chunk.start)
        if chunk.draws and request.max_new_tokens:
            first_draw = len(sequence.tokens) == sequence.prompt_length and sequence.index == 0
            for index in range(sequence.index, request.n if first_draw else sequence.index + 1):
                draws.append(_draw(sequence, index, len(wanted)))
            wanted.append(at + chunk.count - 1)
        for j, token in enumerate(sequence.proposed[: chunk.proposals]):
            tokens.append(token)
            if drafted and not request.sampling.greedy:
                place = len(sequence.tokens) - sequence.prompt_length + j
                verdict = uniform(request.seed, sequence.index, place, ":verdict")
                draws[-1] = dataclasses.replace(draws[-1], proposal=Proposal(token, (j, rows[j]), verdict))
            rows[j] += 1
            draws.append(_draw(sequence, sequence.index, len(wanted), sequence.proposed[: j + 1]))
            wanted.append(at + chunk.count + j)
    return Batch(
        tokens=tuple(tokens),
        new=tuple(chunk.count + chunk.proposals for chunk in step.chunks),
        kept=tuple(chunk.start for chunk in step.chunks),
        tables=tuple(tuple(chunk.sequence.pages) for chunk in step.chunks),
        slots=tuple(chunk.sequence.slot for chunk in step.chunks),
        wanted=tuple(wanted),
        draws=tuple(draws),
        scores=tuple(scores),
        copies=step.copies,
        slot_copies=step.slot_copies,
    )


def drafts_later(step: Step, chunk: Chunk) -> bool:
    """Whether the draft model leaves out a token, which it computes together with those before its next proposal."""
    generates = len(chunk.sequence.tokens) > chunk.sequence.prompt_length
    return chunk.count == 1 and not chunk.proposals and generates and not step.copies


def plan_draft(step: Step, number: int, heads: bool = False) -> Batch:
    """Pass `number` of the draft model: first all that the step computes, later the token that it has just drawn.

    With `heads` that of the model's own, which have computed with it all tokens but the newest.
    """
    tokens: list[int] = []
    wanted: list[int] = []
    draws: list[Draw] = []
    rows: list[tuple[Chunk, int, int]] = []  # chunk, tokens before it, new tokens
    for chunk in step.chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        if number == 0 and not heads:
            if drafts_later(step, chunk):
                continue
            start = chunk.start - sequence.lag
            rows.append((chunk, start, end - start))
            tokens += sequence.tokens[start:end]
        elif chunk.proposals > number:
            rows.append((chunk, end - 1 + number, 1))
            tokens.append((sequence.proposed or sequence.tokens)[-1])
        if chunk.proposals > number:
            drawn = _draw(sequence, sequence.index, len(wanted), sequence.proposed, ":proposal")
            draws.append(dataclasses.replace(drawn, log_probs=None))
            wanted.append(len(tokens) - 1)
    return Batch(
        tokens=tuple(tokens),
        new=tuple(count for _, _, count in rows),
        kept=tuple(start for _, start, _ in rows),
        tables=tuple(tuple(chunk.sequence.pages) for chunk, _, _ in rows),
        slots=(0,) * len(rows),
        wanted=tuple(wanted),
        draws=tuple(draws),
        copies=step.copies if number == 0 else (),
        draft=number,
    )


def _draw(sequence: Sequence, index: int, at: int, proposed: Items[int] = (), of: str = "") -> Draw:
    """The draw of a token behind a sequence and what is proposed behind it."""
    request, params = sequence.request, sequence.request.sampling
    place = len(sequence.tokens) - sequence.prompt_length + len(proposed)
    may_stop, grammar = place >= request.min_new_tokens, sequence.grammar
    return Draw(
        at,
        params,
        0.0 if params.greedy else uniform(request.seed, index, place, of),
        tuple(request.stop_ids) if grammar is None and not may_stop else (),
        (request.prompt, (*sequence.answer, *proposed)) if params.penalises else ((), ()),
        request.log_probs,
        request.raw_log_probs,
        allowed=None if grammar is None else grammar.allowed(proposed, request.stop_ids, may_stop),
    )
