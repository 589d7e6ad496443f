"""Logits from a cache are the logits of the whole sequence, whoever stands beside it and whatever lay there before."""

from __future__ import annotations

import pytest
import torch

from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.static_cache import StaticCache
from tests.inference.models import NAMES, ours, weights
from tests.inference.ranked import LENGTH, PROMPTS, build, bytes_on_rank, ids, in_pieces, pieces_on_ranks
from tests.thorough import mostly_thorough


@pytest.mark.parametrize("name", NAMES)
def test_piece_by_piece_is_the_whole(name):
    """In fp64, where only a mistake would be seen."""
    model, tokens = build(*weights(name)).double(), ids(2, LENGTH)
    with torch.no_grad():
        want = model.full_logits(tokens)
    for key_length in (False, True):
        assert (in_pieces(model, tokens, key_length) - want).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "tp, names",
    mostly_thorough([(2, ("gpt2", "mistral", "qwen2.5-tied-mqa")), (4, ("llama3.1", "qwen3", "qwen2.5-yarn"))], [0]),
)
def test_over_tensor_parallel_ranks(ranks, tp, names):
    found = ranks(tp).run(pieces_on_ranks, [weights(name) for name in names])
    for i, name in enumerate(names):
        assert all(torch.equal(rank[i], found[0][i]) for rank in found), "ranks would draw different words"
        with torch.no_grad():
            assert (found[0][i] - ours(name).full_logits(ids(2, LENGTH))).abs().max() <= 1e-5


def after_prompts(model, prompts, pad, cache=None):
    """Logits after ragged prompts and after each of 6 more tokens: [b, 7, V]."""
    n, lengths = max(map(len, prompts)), torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.tensor([[*prompt, *[pad] * (n - len(prompt))] for prompt in prompts])
    cache = cache or StaticCache(model, len(prompts), 16)
    with torch.no_grad():
        view = cache.prefill(n, lengths)
        found = [model.full_logits(tokens, inference_context=view, logits_at=lengths - 1)]
        cache.advance(lengths)
        for i in range(6):
            more = torch.tensor([[(sum(prompt) + 7 * i) % 99] for prompt in prompts])
            found.append(model.full_logits(more, inference_context=cache.decode()))
            cache.advance(1)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "mixtral", "deepseek_v3"])
def test_each_of_ragged_prompts_is_as_if_alone(name):
    together = after_prompts(ours(name), PROMPTS, pad=0)
    change = (together - after_prompts(ours(name), PROMPTS, pad=98)).abs().max()
    assert change <= (1e-6 if ours(name).config.num_experts else 0.0), "padding is seen"
    for i, prompt in enumerate(PROMPTS):
        assert (together[i] - after_prompts(ours(name), [prompt], pad=0)[0]).abs().max() <= 1e-6


def test_what_lay_in_the_cache_before_is_forgotten():
    model = ours("mistral")
    cache = StaticCache(model, 3, 16)
    for buffers in cache.layers.values():
        for buffer in buffers.values():
            buffer.fill_(torch.nan)
    cache.positions += 5
    assert torch.equal(after_prompts(model, PROMPTS, 0, cache), after_prompts(model, PROMPTS, 0))


def test_bytes_are_the_formula(ranks):
    per_layer_and_token = {"llama2": 2 * 2 * 16, "qwen2.5-tied-mqa": 2 * 1 * 16, "deepseek_v3": 20 + 8}
    for name, numbers in per_layer_and_token.items():
        layers = ours(name).config.num_layers
        assert StaticCache(ours(name), 3, 16).nbytes == 4 * layers * 16 * 3 * numbers
    assert ranks(2).run(bytes_on_rank, *weights("llama2")) == [4 * 2 * 16 * 3 * 2 * 1 * 16] * 2


def test_refusals():
    with pytest.raises(ConfigError, match="0 sequences"):
        StaticCache(ours("llama2"), 0, 8)
    with pytest.raises(DataError, match="a prompt of 9 tokens, and the cache has room for 8"):
        StaticCache(ours("llama2"), 1, 8).prefill(9)
