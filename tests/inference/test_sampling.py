"""Words are drawn with the probabilities that the parameters say, the same everywhere, and none that is left out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.errors import ConfigError
from minimegatron.inference.sampling import (
    GREEDY,
    SPARE,
    Rows,
    SamplingParams,
    candidates,
    filtered,
    log_probabilities,
    sample,
    uniform,
)

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -4.0, 0.0])
RARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}  # chi-squared that 1 of 1000 exceeds, by degrees of freedom
PARAMS = [
    SamplingParams(),
    SamplingParams(0.6),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(1.7, 4, 0.7),
    SamplingParams(0.9, 5, 0.95, min_p=0.2),
]


def draws(logits, params, u):
    u = torch.as_tensor(u, dtype=torch.float64)
    return sample(logits.expand(len(u), -1), Rows.of([params] * len(u)), u)


def uniforms(seed, answer, count):
    return torch.tensor([uniform(seed, answer, place) for place in range(count)], dtype=torch.float64)


def allowed(logits, params):
    return filtered(logits, Rows.of([params] * len(logits)))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_words_that_may_be_drawn_are_hugging_faces(params):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * 3
    want = warpers.TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        want = warpers.TopKLogitsWarper(params.top_k)(None, want)
    if params.top_p:
        want = warpers.TopPLogitsWarper(params.top_p)(None, want)
    if params.min_p:
        want = warpers.MinPLogitsWarper(params.min_p)(None, want)
    assert torch.equal(allowed(logits, params), want)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_frequencies(params):
    """Chi-squared with a fixed seed, against probabilities from the definition."""
    n, want = 20_000, allowed(LOGITS[None], params)[0].double().softmax(-1)
    words = draws(LOGITS, params, uniforms(7, 0, n))
    counts = torch.bincount(words, minlength=len(LOGITS)).double()
    assert counts[want == 0].sum() == 0
    kept = want > 0
    chi2 = ((counts - n * want)[kept].square() / (n * want[kept])).sum().item()
    assert chi2 < RARE[int(kept.sum()) - 1]


@settings(max_examples=60)
@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=12),
    st.sampled_from(PARAMS),
    st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
)
def test_a_word_is_where_u_falls_into_the_distribution(logits, params, u):
    logits = torch.tensor([logits])
    (word,) = sample(logits, Rows.of([params]), torch.tensor([u], dtype=torch.float64))
    mass = allowed(logits, params)[0].softmax(-1).double()
    below, whole = mass[:word].sum().item(), mass.sum().item()
    assert mass[word] > 0 and below - 1e-12 <= u * whole <= below + mass[word].item() + 1e-12


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([None, 0.125, 4.0]), st.lists(st.sampled_from(PARAMS[2:]), max_size=3))
def test_few_candidates_draw_the_words_that_all_would(seed, grid, others):
    """Logits on a grid, as those in bf16 are, often equal a k-th, and now and then more of them than were found."""
    params = [SamplingParams(0.8, 20, 0.95, 0.02), SamplingParams(1.3, 7), GREEDY, *(p for p in others if p.top_k)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), 700, generator=generator) * 2
    logits = logits if grid is None else (logits / grid).round() * grid
    u = torch.rand(len(params), dtype=torch.float64, generator=generator)
    rows = Rows.of(params)
    found, sorted_ = sample(logits, rows, u), sample(logits, dataclasses.replace(rows, most=0), u)
    assert torch.equal(found, sorted_)
    few = candidates(logits, rows)
    assert (few is None) == (grid == 4.0)
    if few is not None:
        assert few[0].shape == (len(params), 20 + SPARE) and torch.equal(logits.gather(-1, few[1]), few[0])


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([None, 0.125]), st.sampled_from([1.0, 4.0]))
def test_a_nucleus_draws_the_words_that_all_would(seed, grid, spread):
    """What a row without a top_k keeps is known by its mass, or by its least likely token; flat rows are sorted."""
    params = [SamplingParams(0.8, top_p=0.9), SamplingParams(1.2, min_p=0.05), SamplingParams(0.7, 20, 0.95), GREEDY]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), 1400, generator=generator) * spread
    logits = logits if grid is None else (logits / grid).round() * grid
    u = torch.rand(len(params), dtype=torch.float64, generator=generator)
    rows = Rows.of(params)
    assert torch.equal(sample(logits, rows, u), sample(logits, dataclasses.replace(rows, most=0), u))
    assert (candidates(logits, rows) is None) == (spread == 1.0)
    assert Rows.of([*params, SamplingParams(0.7)]).most == 0, "one that leaves nothing out needs all"


def test_log_probabilities_are_those_before_anything_is_left_out():
    words = draws(LOGITS, SamplingParams(0.5, 3, 0.9), uniforms(0, 0, 50))
    log_probs = log_probabilities(LOGITS.expand(50, -1), words, torch.full((50,), 0.5))
    assert torch.allclose(log_probs, (LOGITS / 0.5).log_softmax(-1)[words], atol=1e-6) and len(set(words.tolist())) > 1


def test_limits():
    u = uniforms(3, 0, 200)
    greedy = draws(LOGITS, GREEDY, u)
    assert set(greedy.tolist()) == {0}
    for nearly_greedy in (SamplingParams(1e-3), SamplingParams(top_p=1e-6)):
        assert torch.equal(draws(LOGITS, nearly_greedy, u), greedy)
    everything = draws(LOGITS, SamplingParams(), u)
    for no_limit in (SamplingParams(top_p=1.0), SamplingParams(top_k=len(LOGITS)), SamplingParams(top_k=10**6)):
        assert torch.equal(draws(LOGITS, no_limit, u), everything)
    assert len(set(draws(LOGITS, SamplingParams(1e6), u).tolist())) == len(LOGITS)


def test_a_sequence_has_numbers_of_its_own():
    assert torch.equal(uniforms(1, 2, 9)[:4], uniforms(1, 2, 4))
    first = {uniforms(seed, sequence, 1).item() for seed in range(20) for sequence in range(20)}
    assert len(first) == 400 and 0 <= min(first) < 0.05 and 0.95 < max(first) < 1


@pytest.mark.parametrize(
    "values, words",
    [
        ({"temperature": 0.0}, "top_k=1 is greedy"),
        ({"temperature": -1.0}, "above 0"),
        ({"temperature": math.nan}, "above 0"),
        ({"temperature": math.inf}, "above 0"),
        ({"top_k": -1}, "whole number"),
        ({"top_k": 2.5}, "whole number"),
        ({"top_p": 1.5}, "share of 1"),
        ({"top_p": -0.1}, "share of 1"),
        ({"top_k": 1, "temperature": 0.5}, "would change nothing"),
        ({"top_k": 1, "top_p": 0.5}, "would change nothing"),
    ],
    ids=str,
)
def test_refusals(values, words):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**values)
    assert words in str(error.value)
