"""Prompts in, continuations out, by an engine that is made for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minimegatron.inference.engine import Continuation, Engine, EngineConfig
from minimegatron.inference.sampling import GREEDY, SamplingParams


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    max_model_len: int | None = None,
) -> list[Continuation]:
    """Continue all prompts together, with an engine that has exactly the pages they need.

    Args:
        model: see `Engine`.
        prompts, max_new_tokens, sampling, stop_ids, seed: see `Engine.generate`; so are returns and errors.
        max_model_len: most tokens of a prompt and its answer; default the model's `max_position_embeddings`.
    """
    size = EngineConfig.page_size
    longest = max(map(len, prompts), default=1) + max(max_new_tokens, 1)
    count = max(1, len(prompts))
    config = EngineConfig(
        max_model_len=max_model_len,
        num_pages=count * -(-longest // size),
        max_num_seqs=count,
        max_num_batched_tokens=max(512, count),
    )
    return Engine(model, config).generate(prompts, max_new_tokens, sampling, stop_ids=stop_ids, seed=seed)
