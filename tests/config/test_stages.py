"""How a model is cut into stages, and every cut that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.config.parallel import SCHEDULES, STRAIGHT, V_SHAPED
from minimegatron.config.stages import parse_layout, plan_stages
from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.schedules import SCHEDULES as REGISTRY

PP, V = "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
PER_CHUNK, LAYOUT = "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def counts(layers: int, **layout: Any) -> list[int]:
    plan = plan_stages(ParallelConfig(**layout), layers)
    assert [n for stage in plan.layers for n in stage] == list(range(layers)), "every layer once, in order"
    assert len(plan.layers) == plan.ranks * plan.chunks
    return [len(stage) for stage in plan.layers]


def test_names_are_those_of_the_registry():
    assert set(SCHEDULES) == set(REGISTRY)
    assert {name for name, entry in REGISTRY.items() if entry.chunks == 1} == set(STRAIGHT)
    assert {name for name, entry in REGISTRY.items() if entry.chunks == 2} == set(V_SHAPED)


@pytest.mark.parametrize(
    "layers, layout, want",
    [
        (4, {}, [4]),
        (8, {PP: 4}, [2] * 4),
        (8, {PP: 2, PER_CHUNK: 2}, [2] * 4),
        (8, {PP: 2, PER_CHUNK: 4}, [4] * 2),
        (12, {PP: 2, V: 3}, [2] * 6),
        (8, {PP: 2, "pipeline_schedule": "zb_v"}, [2] * 4),
        (7, {PP: 3, FIRST: 1}, [1, 3, 3]),
        (7, {PP: 3, FIRST: 2, LAST: 1}, [2, 4, 1]),
        (3, {PP: 2, LAST: 0}, [3, 0]),
        (10, {PP: 2, FIRST: 4, V: 2}, [2, 3, 2, 3]),
        (10, {PP: 4, EMBEDDING: True, LOSS: True}, [2, 3, 3, 2]),
        (7, {PP: 2, V: 2, LOSS: True}, [2, 2, 2, 1]),
        (7, {PP: 2, LAYOUT: "Et*3|(tt|)*2,L"}, [3, 2, 2, 0]),
    ],
    ids=str,
)
def test_cuts(layers, layout, want):
    assert counts(layers, **layout) == want


@pytest.mark.parametrize(
    "layout, schedule, chunks",
    [
        ({PP: 2}, "1f1b", 1),
        ({PP: 2, V: 2}, "interleaved", 2),
        ({PP: 2, PER_CHUNK: 4}, "1f1b", 1),
        ({PP: 2, "pipeline_schedule": "interleaved"}, "interleaved", 2),
        ({PP: 2, "pipeline_schedule": "dualpipe_v"}, "dualpipe_v", 2),
        ({PP: 2, LAYOUT: "Ett|tt|tt|ttL"}, "interleaved", 2),
    ],
    ids=str,
)
def test_schedules_by_default(layout, schedule, chunks):
    plan = plan_stages(ParallelConfig(**layout), 8)
    assert (plan.schedule, plan.chunks) == (schedule, chunks)


@pytest.mark.parametrize(
    "layers, layout, words",
    [
        (7, {PP: 2}, r"pipeline_model_parallel_size \(2\) does not divide num_layers \(7\)"),
        (6, {PP: 2, V: 2}, r"stages of a rank \(4\) does not divide num_layers \(6\)"),
        (8, {PP: 2, PER_CHUNK: 3}, "choose num_layers_per_virtual_pipeline_stage among 1, 2, 4"),
        (8, {PP: 2, FIRST: 9}, "leave -1 for 1 others"),
        (8, {PP: 3, FIRST: 3}, "leave 5 for 2 others"),
        (8, {PP: 2, FIRST: 3, LAST: 4}, "leave 1 for 0 others"),
        (8, {PP: 2, FIRST: 3, V: 2}, "the layers of rank 0"),
        (8, {PP: 2, FIRST: 4, "pipeline_schedule": "zb_v"}, "whose first rank also has the last stage"),
        (8, {PP: 2, "pipeline_schedule": "zb_h1", V: 2}, "zb_h1 has one stage on a rank"),
        (12, {PP: 2, "pipeline_schedule": "zb_v", V: 3}, "2 stages on every rank"),
        (8, {PP: 2, LAYOUT: "Ett|tt|ttttL"}, "3 stages for 2 ranks"),
        (8, {PP: 2, LAYOUT: "Ett|ttL"}, "has 4 layers, the model 8"),
        (8, {PP: 2, LAYOUT: "tttt|ttttL"}, "not one E at the start"),
        (8, {PP: 2, LAYOUT: "Ettxt|ttttL"}, "'x' means nothing"),
        (8, {PP: 2, V: 2, LAYOUT: "Etttt|ttttL"}, "1 stages a rank, and the number is given elsewhere"),
    ],
    ids=str,
)
def test_refusals(layers, layout, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_model_fits(TransformerConfig(num_layers=layers), ParallelConfig(**layout))
    assert caught.value.fix


@pytest.mark.parametrize(
    "layout, words",
    [
        ({V: 2}, "without a pipeline"),
        ({LOSS: True}, "account_for_loss_in_pipeline_split without a pipeline"),
        ({PP: 2, V: 0}, "at least 1"),
        ({PP: 2, FIRST: -1}, "at least 0"),
        ({PP: 2, FIRST: 1, EMBEDDING: True}, "each say where the layers go"),
        ({PP: 2, LAYOUT: "Et|tL", PER_CHUNK: 1}, "each say where the layers go"),
        ({PP: 2, "pipeline_schedule": "zb_v2"}, "zb_v"),
    ],
    ids=str,
)
def test_refused_at_construction(layout, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ParallelConfig(**layout)
    assert caught.value.fix


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_a_layout_says_what_it_says(stages):
    text = "E" + "|".join(f"t*{n}" if n else "" for n in stages) + ",L"
    assert parse_layout(text, sum(stages)) == stages
