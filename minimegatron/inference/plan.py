"""A step as plain numbers: rank 0 plans a `Batch` from the scheduler's chunks, all ranks compute it, and return a
`Result`.

    tokens      one row: the chunks of all sequences concatenated, each followed by its proposed tokens
    wanted      positions in the row whose logits are needed: for each draw, for each prompt token to score
    draws       for each: which of the wanted logits, sampling parameters, random number u
    scores      for each: which of the wanted logits, which token

A sequence has one draw when its last token is computed: n draws at the end of a prompt with `n` answers, k + 1 with k
proposed tokens. A `Result` has the outcomes in the order of draws and scores.

Megatron-LM: `megatron/core/inference/contexts/dynamic_context.py` (there tensors that every rank makes itself).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence as Items
from typing import Any

from minimegatron.config.vision import VisionFields
from minimegatron.data.pictures import picture_part
from minimegatron.inference.sampling import SamplingParams, uniform
from minimegatron.inference.scheduler import Chunk, Step
from minimegatron.inference.sequence import Ranked, Sequence


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A token that the draft model or a depth (MTP) has drawn, to be verified.

    Attributes:
        token: the id.
        at: (pass of the proposer in this step, row in it) of the distribution it was drawn from.
        u: random number of the acceptance, in [0, 1).
    """

    token: int
    at: tuple[int, int]
    u: float


@dataclasses.dataclass(frozen=True)
class Draw:
    """A token to draw.

    Attributes:
        at: index into the wanted logits.
        params: sampling parameters.
        u: random number of the draw, in [0, 1).
        banned: ids that may not be drawn.
        history: (prompt without a source, answer so far), for penalties; empty without.
        log_probs: None: none; k: that of the drawn token, and of the k most likely tokens.
        raw: log-probabilities of softmax(logits) in place of softmax(logits / T).
        proposal: the token proposed for this place; None without, and for one that was proposed without drawing.
        allowed: ids that a grammar allows, packed (`grammar.unpacked`); None: all.
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
    """A prompt token whose log-probability is asked for.

    Attributes:
        at: index into the wanted logits.
        token: the id.
        top: number of the most likely tokens to return with it.
        temperature: T of softmax(logits / T).
    """

    at: int
    token: int
    top: int
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step as plain numbers, the same on all ranks.

    Attributes:
        tokens: the row of ids; new, kept, tables, slots: see `PagedCache.context`.
        wanted: positions in the row whose logits are needed.
        copies, slot_copies: (from, to) pages and slots, copied before the forward pass.
        draft: number of the proposer's pass in this step; None: the model's own pass.
        adapters: of each sequence, by name; "" for none. A proposer's pass has none.
        seen: positions and pictures of the row (`data/pictures.picture_part`); None where no sequence has pictures.
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
    adapters: tuple[str, ...] = ()
    seen: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a batch.

    Attributes:
        tokens: the token of each draw.
        log_probs, top: of each draw; NaN and () where not asked for.
        finite: whether the logits of the draw were finite.
        scores: (log-probability, most likely tokens) of each score.
    """

    tokens: list[int]
    log_probs: list[float]
    top: list[Ranked]
    finite: list[bool]
    scores: list[tuple[float, Ranked]]


def scored_tokens(chunk: Chunk) -> int:
    """How many tokens of a chunk predict a prompt token whose log-probability is asked for."""
    sequence = chunk.sequence
    if sequence.request.prompt_log_probs is None or sequence.index:
        return 0
    first = max(chunk.start, next_scored(sequence))
    return max(0, min(chunk.start + chunk.count, sequence.prompt_length - 1) - first)


def next_scored(sequence: Sequence) -> int:
    """The position whose logits predict the next prompt token to be scored."""
    return sequence.request.prompt_log_probs_start - 1 + len(sequence.prompt_log_probs)


def plan(step: Step, config: VisionFields, drafted: bool = False) -> Batch:
    """The batch of the model's own pass.

    Args:
        step: the scheduler's; its sequences have their `proposed` tokens.
        config: the model.
        drafted: the proposed tokens were drawn by a model ("draft_model", "mtp"), not looked up.
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
        adapters=tuple(chunk.sequence.request.adapter for chunk in step.chunks),
        seen=picture_part([(c.sequence.seen, c.start, c.start + c.count + c.proposals) for c in step.chunks], config),
    )


def drafts_later(step: Step, chunk: Chunk) -> bool:
    """Whether the draft model skips a token now, and computes it in the pass before its next proposal."""
    generates = len(chunk.sequence.tokens) > chunk.sequence.prompt_length
    return chunk.count == 1 and not chunk.proposals and generates and not step.copies


def plan_draft(step: Step, number: int, heads: bool = False) -> Batch:
    """The batch of pass `number` of the proposer.

    Pass 0 of a draft model computes all tokens of the step, each later pass the token just drawn. With `heads` the
    proposer is the model's own depths: these computed the earlier tokens with the model, so every pass has one token.
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
    """The draw of the token that comes after a sequence and `proposed`."""
    request, params = sequence.request, sequence.request.sampling
    place = len(sequence.tokens) - sequence.prompt_length + len(proposed)
    may_stop, grammar = place >= request.min_new_tokens, sequence.grammar
    return Draw(
        at,
        params,
        0.0 if params.greedy else uniform(request.seed, index, place, of),
        tuple(request.stop_ids) if grammar is None and not may_stop else (),
        (sequence.continued, (*sequence.answer, *proposed)) if params.penalises else ((), ()),
        request.log_probs,
        request.raw_log_probs,
        allowed=None if grammar is None else grammar.allowed(proposed, request.stop_ids, may_stop),
    )
