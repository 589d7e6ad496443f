"""Logits from pages are the logits of the whole sequence, whoever stands beside it and whatever lay there before."""

from __future__ import annotations

import pytest
import torch

from tests.inference.models import NAMES, ours, weights
from tests.inference.ranked import LENGTH, PROMPTS, build, bytes_on_rank, ids, in_pieces, pages_of, pieces_on_ranks
from tests.thorough import mostly_thorough


@pytest.mark.parametrize("name", NAMES)
def test_piece_by_piece_is_the_whole(name):
    """In fp64, where only a mistake would be seen."""
    model, tokens = build(*weights(name)).double(), ids(2, LENGTH)
    with torch.no_grad():
        assert (in_pieces(model, tokens) - model.full_logits(tokens)).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "tp, names",
    mostly_thorough(
        [(2, ("gpt2", "mistral", "qwen2.5-tied-mqa", "mamba2")), (4, ("llama3.1", "qwen3", "qwen2.5-yarn"))], [0]
    ),
)
def test_over_tensor_parallel_ranks(ranks, tp, names):
    found = ranks(tp).run(pieces_on_ranks, [weights(name) for name in names])
    for i, name in enumerate(names):
        assert all(torch.equal(rank[i], found[0][i]) for rank in found), "ranks would draw different words"
        with torch.no_grad():
            assert (found[0][i] - ours(name).full_logits(ids(2, LENGTH))).abs().max() <= 1e-5


def after_prompts(model, prompts, leftover=0.0):
    """Logits [prompts, 7, V] after ragged prompts in one row, and after each of 6 more tokens of all of them."""
    cache, tables = pages_of(model, len(prompts), 16)
    for buffers in cache.layers.values():
        for buffer in buffers.values():
            buffer.fill_(leftover)
    slots, found = range(1, len(prompts) + 1), []
    new, kept = [len(prompt) for prompt in prompts], [0] * len(prompts)
    row = [token for prompt in prompts for token in prompt]
    for i in range(7):
        context = cache.context(new, kept, tables, slots)
        with torch.inference_mode():
            logits = model.full_logits(
                torch.tensor([row]), inference_context=context, logits_at=context.starts[1:].long() - 1
            )
        found.append(logits[0])
        kept, new = [a + b for a, b in zip(kept, new, strict=True)], [1] * len(prompts)
        row = [(sum(prompt) + 7 * i) % 99 for prompt in prompts]
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    "name", ["gpt2", "mistral", "mixtral", "gemma2", "deepseek_v3", "gpt_oss", "mamba2", "nemotron_h", "qwen3_next"]
)
def test_each_of_ragged_prompts_is_as_if_alone(name):
    together = after_prompts(ours(name), PROMPTS)
    assert torch.equal(together, after_prompts(ours(name), PROMPTS, torch.nan)), "what lay there before is seen"
    for i, prompt in enumerate(PROMPTS):
        assert (together[i] - after_prompts(ours(name), [prompt])[0]).abs().max() <= 1e-5


def test_bytes_are_the_formula(ranks):
    per_layer_and_token = {"llama2": 2 * 2 * 16, "qwen2.5-tied-mqa": 2 * 1 * 16, "deepseek_v3": 20 + 8}
    tokens = 3 * 16 + 4  # and a page for padding
    for name, numbers in per_layer_and_token.items():
        assert pages_of(ours(name), 3, 16)[0].nbytes == 4 * ours(name).config.num_layers * tokens * numbers
    assert ranks(2).run(bytes_on_rank, *weights("llama2")) == [4 * 2 * tokens * 2 * 1 * 16] * 2
