"""Random streams: who draws the same numbers, and what a replay draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.comm.random import DEFAULT, EXPERT_PARALLEL, MODEL_PARALLEL, RngStreams, stream_seeds
from minimegatron.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def streams(seed: int = 1234, **coordinates: Any) -> RngStreams:
    return RngStreams.for_rank(stream_seeds(seed, **coordinates))


def draw(rng: RngStreams, name: str = DEFAULT) -> list[float]:
    if name == DEFAULT:
        return torch.rand(4).tolist()
    with rng.fork(name):
        return torch.rand(4).tolist()


def test_seeds_are_megatrons() -> None:
    seeds = stream_seeds(1234, tp_rank=3, pp_rank=2, ep_rank=4, etp_rank=1)
    assert seeds == {
        "default": 1434,
        "data-parallel-rng": 1434,
        "model-parallel-rng": 1434 + 2718 + 3,
        "expert-parallel-rng": 1434 + 1024 + 400 + 1,
    }


def test_ranks_with_other_tokens_have_other_seeds_and_experts_and_the_rest_do_not() -> None:
    first, second = stream_seeds(1), stream_seeds(1, data_rank=1)
    assert {name for name in first if first[name] != second[name]} == {DEFAULT, MODEL_PARALLEL}


def test_tp_ranks_share_the_default_stream_and_nothing_else() -> None:
    drawn = {}
    for tp in range(4):
        rng = streams(tp_rank=tp)
        drawn[tp] = (draw(rng), draw(rng, MODEL_PARALLEL))
    assert len({tuple(default) for default, _ in drawn.values()}) == 1
    assert len({tuple(parallel) for _, parallel in drawn.values()}) == 4


@pytest.mark.parametrize("axis", ["pp_rank", "ep_rank", "etp_rank"])
def test_experts_differ_along_their_axes(axis: str) -> None:
    assert draw(streams(**{axis: 0}), EXPERT_PARALLEL) != draw(streams(**{axis: 1}), EXPERT_PARALLEL)


@given(st.lists(st.sampled_from([DEFAULT, MODEL_PARALLEL, EXPERT_PARALLEL]), max_size=12))
def test_each_stream_goes_on_as_if_it_were_alone(order: list[str]) -> None:
    rng = streams()
    together = [(name, draw(rng, name)) for name in order]
    for name in set(order):
        alone = streams()
        assert [numbers for n, numbers in together if n == name] == [draw(alone, name) for n in order if n == name]


def test_a_fork_inside_a_fork_of_the_same_stream_draws_on() -> None:
    rng, other = streams(), streams()
    with rng.fork():
        nested = [torch.rand(4).tolist()]
        with rng.fork():
            nested.append(torch.rand(4).tolist())
        nested.append(torch.rand(4).tolist())
    assert nested == [draw(other, MODEL_PARALLEL) for _ in range(3)]


def test_a_stream_in_use_cannot_be_forked_from_inside_another() -> None:
    rng = streams()
    with rng.fork(MODEL_PARALLEL), rng.fork(EXPERT_PARALLEL):
        with pytest.raises(ConfigError, match="in use outside of 'expert-parallel-rng'"):
            rng.fork(MODEL_PARALLEL).__enter__()


def test_an_error_in_a_fork_gives_the_default_stream_back() -> None:
    rng = streams()
    with pytest.raises(ZeroDivisionError), rng.fork():
        torch.rand(4)
        raise ZeroDivisionError
    assert draw(rng) == draw(streams())


def test_duplicates_and_unknown_names_are_refused() -> None:
    rng = streams(seed=7)
    with pytest.raises(ConfigError, match="already"):
        rng.add(MODEL_PARALLEL, 99)
    with pytest.raises(ConfigError, match="same seed 2725"):
        rng.add("mine", 7 + 2718)
    with pytest.raises(ConfigError, match="no random stream 'mine'"):
        rng.fork("mine").__enter__()


def block(rng: RngStreams, x: torch.Tensor) -> torch.Tensor:
    """Dropout on the hidden state, then on the attention."""
    x = F.dropout(x, 0.5)
    with rng.fork():
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replay_draws_the_masks_of_the_forward_and_leaves_no_trace(sequence_parallel: bool) -> None:
    rng, x = streams(), torch.ones(64)
    # Under sequence parallelism the whole block runs inside a fork, and its recomputation, later, does not.
    with rng.fork() if sequence_parallel else contextlib.nullcontext():
        first = block(rng, x)
        snapshot = rng.snapshot()
        second = block(rng, x)
    later = rng.snapshot()
    with rng.replay(snapshot):
        assert torch.equal(block(rng, x), second)
    assert not torch.equal(first, second)
    after = block(rng, x)
    with rng.replay(later):
        assert torch.equal(block(rng, x), after)


def test_a_saved_state_continues_exactly() -> None:
    rng = streams()
    draw(rng), draw(rng, MODEL_PARALLEL)
    saved = rng.state_dict()
    expected = [draw(rng, name) for name in (DEFAULT, MODEL_PARALLEL, EXPERT_PARALLEL, MODEL_PARALLEL)]
    fresh = streams(seed=5)
    fresh.load_state_dict(saved)
    assert [draw(fresh, name) for name in (DEFAULT, MODEL_PARALLEL, EXPERT_PARALLEL, MODEL_PARALLEL)] == expected


def test_a_saved_state_of_other_streams_is_refused() -> None:
    saved = streams().state_dict()
    del saved[EXPERT_PARALLEL]
    with pytest.raises(CheckpointError, match="random streams"):
        streams().load_state_dict(saved)
    with pytest.raises(CheckpointError, match="generators of 'default'"):
        streams().load_state_dict({n: {**s, "cuda": s["cpu"]} for n, s in streams().state_dict().items()})
