"""Random layouts of the families with many parts of their own have the gradients of one process.

Each draws how many ranks share what (tp with or without sequence parallelism, cp in all its ways, pp with its schedules
and any cut of the layers, ep, etp, dp with its ways to shard), recomputation, microbatches, documents and a replica
without a token that counts; of the model heads, groups and what else changes how it is cut.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from minimegatron.comm.mesh import Mesh
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import ConfigError
from minimegatron.models.chunks import build_chunks
from tests.axes import CP, EP, ETP, PP, SP, TP
from tests.parallel import test_bert_twin as bert
from tests.parallel import test_encoder_decoder_twin as t5
from tests.parallel import test_expert_twin as experts
from tests.parallel import test_hybrid_twin as hybrid
from tests.parallel import test_serial_twin as serial
from tests.parallel import test_vision_twin as vision
from tests.thorough import SLOW, mostly_thorough
from tests.twin import Case

# family -> its model, and changes of it of which one is drawn
FAMILIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "bert": (bert.BERT, [{}, bert.EXPERTS, {"bert_head": "lm"}, {"num_attention_heads": 8, "num_query_groups": 8}]),
    "megatron-bert": (bert.MEGATRON, [{}, {"bert_head": "lm", "untie_embeddings_and_output_weights": True}]),
    "t5": (t5.SIZES, [{}, t5.GATED, {"encoder_num_layers": 3}, {"num_attention_heads": 8, "num_query_groups": 8}]),
    "mamba2": (
        {**hybrid.SIZES, "family": "mamba2", "hybrid_override_pattern": "MMMM"},
        [{}, {"mamba_num_groups": 8}, {"mamba_dt_limit_min": 0.3, "mamba_dt_limit_max": 0.9}],
    ),
    "nemotron_h": (hybrid.SIZES, [{}, hybrid.EXPERTS, {"hybrid_override_pattern": "-M**", "num_query_groups": 1}]),
    "qwen3_next": (hybrid.DELTA, [{}, hybrid.DENSE, {"num_query_groups": 4}, {"linear_attention_freq": "3"}]),
    "gpt_oss": (
        experts.GPT_OSS,
        [{}, {"num_query_groups": 4, "num_layers": 4}, {"moe_token_dispatcher_type": "alltoall"}],
    ),
    "gemma3_text": (serial.TWO_BASES, [{}, {"num_layers": 4}, {"num_query_groups": 1, "rotary_base_local": None}]),
    "qwen2_5_vl": (vision.SEES, [{}, {"num_layers": 4}, {"vision_fullatt_block_indexes": (), "num_query_groups": 4}]),
    "llava": (vision.CLIP, [{}, {"num_layers": 3}, {"vision_patch_size": 4, "num_query_groups": 1}]),
}  # fmt: skip
RECOMPUTED: list[dict[str, Any]] = [{}, {}, hybrid.FULL, hybrid.CORES]
SHARDING = ("no_shard", "plain", "optim", "optim_grads", "optim_grads_params", "fsdp2")


def drawn_layout(draw: random.Random, world: int, layers: int, routes: bool) -> tuple[dict[str, Any], int, int]:
    """Fields of a layout, its replicas, and microbatches that its schedule takes; of a model with experts, if it
    routes.
    """
    sizes, left = {}, world
    for axis in draw.sample([TP, CP, PP], 3):
        sizes[axis] = draw.choice([n for n in (1, 2, 2, 4) if left % n == 0])
        left //= sizes[axis]
    layout, p = {axis: size for axis, size in sizes.items() if size > 1}, sizes[PP]
    if sizes[TP] > 1:
        layout[SP] = routes or draw.random() < 0.6
    if routes:
        layout |= {EP: draw.choice([1, 2, 2, 4]), ETP: draw.choice([1, sizes[TP]])}
    if sizes[CP] > 1:
        layout["cp_comm_type"] = draw.choice(["p2p", "a2a", "allgather"])
        if sizes[CP] == 4 and draw.random() < 0.4:
            layout |= {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
    if p == 1:
        return layout, left, draw.randint(1, 3)
    layout["pipeline_schedule"] = draw.choice(["gpipe", "1f1b", "zb_h1", "interleaved", "zb_v", "dualpipe_v"])
    stages = p if layout["pipeline_schedule"] in ("gpipe", "1f1b", "zb_h1") else 2 * p
    if layers % stages or draw.random() < 0.5:
        cuts = sorted(draw.choices(range(layers + 1), k=stages - 1))
        parts = ["t" * (b - a) for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
        layout["pipeline_model_parallel_layout"] = "E" + "|".join(parts) + "L"
    return layout, left, p * draw.choice([1, 2]) if stages == p else 2 * p


def drawn(family: str, seed: int) -> tuple[Case, int]:
    """A case that is allowed, and its replicas; drawn until one is."""
    draw, (model, changes) = random.Random(f"{family} {seed}"), FAMILIES[family]
    world = 2 if seed % 3 == 0 else 4
    for _ in range(100):
        fields = {**model, **draw.choice(changes), **draw.choice(RECOMPUTED)}
        config = Case({}, fields).config
        layout, dp, accumulation = drawn_layout(draw, world, config.num_layers, config.num_experts is not None)
        sharding = draw.choice(SHARDING) if dp > 1 or layout.get(CP, 1) > 1 else "no_shard"
        overlap = sharding != "fsdp2" and draw.random() < 0.5
        case = Case(
            layout,
            fields,
            accumulation,
            overlap,
            bucket_size=500 if overlap and sharding != "optim_grads_params" and draw.random() < 0.5 else None,
            sharding=sharding,
            double=True,
            seed=seed,
            empty_rank=draw.choice([None, 0, dp - 1]) if dp > 1 else None,
            documents=draw.random() < 0.5,
        )
        try:
            assert case.parallel.data_parallel_size(world) == dp
            check_model_fits(case.config, case.parallel, case.seq_length)
            ranks = [build_chunks(case.config, Mesh.planned(case.parallel, rank, world)) for rank in range(world)]
        except ConfigError:
            continue
        if all(any(True for _ in chunks.parameters()) for chunks in ranks):  # the others do not know that it is in fp64
            return case, dp
    raise AssertionError(f"no layout of {family} is allowed")


@SLOW
def test_many_kinds_of_layouts_are_drawn():
    cases = [drawn(family, seed)[0] for family in FAMILIES for seed in range(6)]
    for axis in (TP, CP, PP, EP):
        assert sum(case.layout.get(axis, 1) > 1 for case in cases) > 5, axis
    for values in (
        [case.sharding for case in cases],
        [case.layout.get("cp_comm_type") for case in cases],
        [case.layout.get("pipeline_schedule") for case in cases],
    ):
        assert len({*values}) >= 5, values


@pytest.mark.parametrize(
    ("family", "seed"),
    mostly_thorough(
        [(family, seed) for family in FAMILIES for seed in range(6)],
        lambda case: case[1] == 0,
        lambda case: case in (("bert", 0), ("gpt_oss", 0)),
    ),
)
def test_a_random_layout_is_one_process(assert_same_as_serial, family, seed):
    case, dp = drawn(family, seed)
    assert_same_as_serial(case, dp)
