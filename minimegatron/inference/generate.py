"""Prompts in, answers out: what one caller asks of an engine, to its end.

| function   | gives                                                                                   |
|------------|-----------------------------------------------------------------------------------------|
| `generate` | a continuation of each prompt                                                           |
| `score`    | the log-probabilities of given continuations                                            |
| `complete` | the answers to any requests: several to a prompt, each with its own sampling or grammar |

All ranks of tp, pp and ep call them with the same arguments; dp replicas may have different prompts. Rank 0 adds the
requests and computes steps until there is no work, the others follow it, and all return the same. For requests that
come while others are computed, call `Engine.add_request` and `Engine.step` yourself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from minimegatron.errors import ConfigError, DataError, MinimegatronError, NumericsError
from minimegatron.inference.engine import Engine, EngineConfig, batched_tokens, check_can_generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.sequence import FinishReason, Output, Request, Sequence


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The answer to a prompt.

    Attributes:
        tokens: the new ids, with the stop id that ended them.
        log_probs: log-probability of each, at the temperature of the draw (`inference/sampling.py`).
        stopped: whether a stop id ended it; otherwise it has `max_new_tokens` tokens.
        weight_version: version of the weights that drew its last token, see `Engine.new_weights`.
    """

    tokens: list[int]
    log_probs: list[float]
    stopped: bool
    weight_version: int = 0


def generate(
    model: Any,
    prompts: Items[Items[int]],
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    stop_ids: Items[int] = (),
    seed: int = 0,
    max_model_len: int | None = None,
) -> list[Continuation]:
    """Continue every prompt.

    Args:
        model: an engine; or a model, see `Engine`, for which one is made that has exactly the pages they need.
        prompts: ids of each prompt, at least one; lengths may differ.
        max_new_tokens: most new tokens of each prompt.
        sampling: how tokens are drawn; default greedy.
        stop_ids: ids that end an answer.
        seed: of the draws; each prompt has its own random numbers.
        max_model_len: of the engine that is made, see `EngineConfig`.

    Returns:
        A continuation for each prompt, in their order.

    Raises:
        ConfigError: nothing to generate, a stop id outside the vocabulary, a model in training mode, or other
            requests under way, whose tokens would be lost.
        DataError: an empty prompt, an id outside the vocabulary, or more tokens than fit.
        RankError: ranks called it with different arguments.
        NumericsError: logits that are NaN or infinite.
    """
    engine = model if isinstance(model, Engine) else _engine_for(model, prompts, max_new_tokens, max_model_len)
    requests = [
        Request(
            tuple(map(int, prompt)),
            max_new_tokens,
            sampling,
            frozenset(map(int, stop_ids)),
            seed=seed + (i << 32),
            log_probs=0,
        )
        for i, prompt in enumerate(prompts)
    ]
    return [
        Continuation(
            answer.answer,
            answer.log_probs,
            answer.reason is FinishReason.STOP,
            weight_version=answer.weight_version,
        )
        for (answer,) in complete(engine, requests)
    ]


def _engine_for(model: Any, prompts: Items[Items[int]], max_new_tokens: int, max_model_len: int | None) -> Engine:
    size, count = EngineConfig.page_size, max(1, len(prompts))
    longest = max(map(len, prompts), default=1) + max(max_new_tokens, 1)
    config = EngineConfig(
        max_model_len=max_model_len,
        num_pages=count * -(-longest // size),
        max_num_seqs=count,
        max_num_batched_tokens=batched_tokens(model, count, max(longest, max_model_len or 0)),
    )
    return Engine(model, config)


def score(
    engine: Engine, sequences: Items[tuple[Items[int], Items[int]]], *, temperature: float = 1.0
) -> list[list[float]]:
    """The log-probabilities of given continuations, as of a teacher-forced forward pass.

    Prompts whose pages are cached are not computed again.

    Args:
        engine: one without requests under way.
        sequences: (prompt, continuation) pairs of ids; a prompt has at least one.
        temperature: T of softmax(logits / T).

    Returns:
        A log-probability for each token of each continuation.

    Raises:
        ConfigError, DataError, RankError, NumericsError: as `generate`.
    """
    sampling = SamplingParams(temperature)
    requests = [
        Request(
            (*map(int, prompt), *map(int, answer)),
            max_new_tokens=0,
            sampling=sampling,
            prompt_log_probs=0,
            prompt_log_probs_start=len(prompt),
        )
        for prompt, answer in sequences
    ]
    return [answer.prompt_log_probs for (answer,) in complete(engine, requests)]


def complete(
    engine: Engine, requests: Items[Request], watch: Callable[[list[Output]], None] | None = None
) -> list[list[Sequence]]:
    """Compute requests to their end.

    Args:
        engine: one without requests under way.
        requests: their ids become "prompt 0", "prompt 1" and so on.
        watch: called on rank 0 with the outputs of each step; it may `finish` sequences.

    Returns:
        The n sequences of each request, on every rank.

    Raises:
        ConfigError, DataError, RankError, NumericsError: as `generate`.
    """
    for model in (engine.model, engine.draft):
        if model is not None:
            check_can_generate(model)
    if engine.has_work:
        raise ConfigError(
            f"generate while {len(engine.sequences)} requests are under way", fix="`step` until `has_work` is false"
        )
    engine.runner.check_agreement(requests)  # first, so that all ranks refuse the same request
    for i, request in enumerate(requests):
        engine.check(request, f"prompt {i}")
    if not engine.runner.leads:
        engine.follow()
        return _or_raise(engine.runner.tell(None))
    answers: list[list[Sequence]] = []
    for i, request in enumerate(requests):
        engine.add_request(request, f"prompt {i}")
        answers.append(engine.sequences[f"prompt {i}"])
    try:
        while engine.has_work:
            outputs = engine.step()
            if watch is not None:
                watch(outputs)
    except BaseException:  # such as an interrupt in a notebook: the next call must find no request under way
        for i in range(len(requests)):
            engine.abort(f"prompt {i}")
        raise
    engine.stop()
    made: list[list[Sequence]] | MinimegatronError = answers
    for answer in (each for several in reversed(answers) for each in reversed(several)):
        if answer.failure:
            made = DataError(f"the grammar's parser gave up: {answer.failure}", where=answer.request_id)
        elif where := _not_a_number(answer):
            made = NumericsError(
                "the log-probability of a token is nan",
                where=f"{answer.request_id}, {where}",
                fix="weights or activations are not finite: check the checkpoint, or a wider params_dtype",
            )
    return _or_raise(engine.runner.tell(made))


def _not_a_number(sequence: Sequence) -> str:
    """The token whose logits were NaN or infinite, in words; "" for none."""
    if sequence.reason is FinishReason.ERROR:
        return f"new token {len(sequence.answer) - 1}"
    place = next((i for i, value in enumerate(sequence.prompt_log_probs) if math.isnan(value)), None)
    return "" if place is None else f"token {sequence.request.prompt_log_probs_start + place}"


def _or_raise(made: list[list[Sequence]] | MinimegatronError) -> list[list[Sequence]]:
    if isinstance(made, MinimegatronError):
        raise made
    return made
