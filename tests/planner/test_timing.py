"""The time of a step against what can be told without it: counted FLOPs, closed forms of bubbles, hidden messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from minimegatron.comm.mesh import Mesh
from minimegatron.config import DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from minimegatron.config.parallel import SPLIT
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import plan_stages
from minimegatron.footprint.dry_run import Run
from minimegatron.footprint.events import Operation, Sent
from minimegatron.footprint.gpu import attention_pairs
from minimegatron.footprint.prediction import Work, sizes_of
from minimegatron.models.chunks import placement_of, schedule_of
from minimegatron.models.families import family_config
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.planner.closed_forms import bubble
from minimegatron.planner.cluster import CLUSTERS, Cluster
from minimegatron.planner.pass_time import BELOW, LAUNCHES, MEMORY, PEAK, RECOMPUTE, PassTime, Pieces, pieces_run
from minimegatron.planner.timing import play, step_time
from minimegatron.training.flops import forward_flops, step_flops
from tests.thorough import mostly_thorough

SIZES: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4,
    "vocab_size": 1024, "params_dtype": "bf16",
}  # fmt: skip
MOE = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 64}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_head_dim": 32,
          "qk_pos_emb_head_dim": 16, "v_head_dim": 48, "num_query_groups": 8}  # fmt: skip
FREE = Cluster(  # memory and links take no time
    gpus_per_node=8, matmul=1e12, matmul_share=1.0, flash_share=1.0, copy=1e30, inside=1e30, between=1e30,
    latency_inside=0.0, latency_between=0.0,
)  # fmt: skip


def run_of(layout: dict[str, Any] | None = None, model: dict[str, Any] | None = None, batch: int = 16) -> RunConfig:
    return RunConfig(
        family_config("llama", **{**SIZES, **(model or {})}),
        ParallelConfig.from_dict(layout or {}),
        OptimizerConfig(),
        DataConfig(mock_data=True, seq_length=512),
        TrainingConfig(micro_batch_size=2, global_batch_size=batch),
    )


@pytest.mark.parametrize(
    "model",
    [
        {},
        MOE,
        {"mtp_num_layers": 2},
        LATENT,
        {"activation": "gelu"},
        {"sliding_window": 128, "window_attn_skip_freq": "2"},
    ],
)
@pytest.mark.parametrize("tp", mostly_thorough([1, 2], [1]))
def test_products_are_those_that_are_counted_as_model_flops(model: dict[str, Any], tp: int) -> None:
    """Attention multiplies five times backward, all else twice."""
    layout = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    run = run_of(layout, model)
    found, config = step_time(run, tp, FREE), run.model
    wide = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    layers = 8 + (config.mtp_num_layers or 0)
    pairs = sum(attention_pairs(512, config.window_of(number)) for number in range(layers))
    core, back = (2 * 8 * pairs * (n * config.kv_channels + m * wide) for n, m in ((1, 1), (3, 2)))
    padded = (layers - 7) * 2 * 512 * 256 * (config.padded_vocab_size(tp) - config.padded_vocab_size(1))
    counted = 3 * (sum(forward_flops(config, 512).values()) + padded - core) + core + back
    assert found.parts[PEAK] * FREE.matmul * tp == pytest.approx(16 * counted, rel=1e-9)
    assert found.model_flops == step_flops(config, 16, 512)


def test_full_recompute_is_one_more_forward_pass_of_the_layers() -> None:
    """But for the last product of each: torch's checkpoint stops at the last tensor that is saved."""
    run = run_of(model={"recompute_granularity": "full"})
    parts, last = forward_flops(run.model, 512), 8 * 2 * 512 * 512 * 256
    found = step_time(run, 1, FREE).parts[RECOMPUTE]
    assert found == pytest.approx(16 * (parts["attention"] + parts["mlp"] - last) / FREE.matmul, rel=1e-9)
    assert RECOMPUTE not in step_time(run_of(), 1, FREE).parts


def layer_of(**model: Any) -> Run:
    """A layer of 4,096 tokens and two samples on a GPU, run."""
    config = family_config("llama", **{**SIZES, **model})
    return pieces_run(sizes_of(config, Mesh.serial(), OptimizerConfig(), Work(4096, 2, device="cuda")), again=False)


def test_flash_attention_is_bound_by_arithmetic_and_moves_no_scores() -> None:
    """Of 4,096 tokens it has 1,365 FLOPs a byte: q, k, v and o travel, 64 were those of the scores."""
    (op,) = (e.what for e in layer_of().events if isinstance(e.what, Operation) and e.what.name == "dry_run.attention")
    assert op.unit == "attention"
    assert op.flops == 2 * 2 * 2 * 8 * 32 * 4096 * 4096 / 2
    assert op.nbytes <= 2 * 4096 * (2 * (8 + 4 + 4 + 8) * 32 + 4 * 8)
    slow = CLUSTERS["h100"].replace(flash_share=0.25)
    faster, slower = (one.operation(op) for one in (CLUSTERS["h100"], slow))
    assert slower == pytest.approx(faster + op.flops / slow.matmul / 0.5)


def test_an_attention_that_keeps_its_weights_multiplies_the_whole_square() -> None:
    events = layer_of(attention_backend="reference").events
    products = [e.what for e in events if isinstance(e.what, Operation) and e.what.name == "aten.bmm"]
    assert len(products) == 6 and {one.unit for one in products} == {"attention"}
    assert {one.flops for one in products} == {2 * 2 * 8 * 32 * 4096 * 4096}
    moved = sum(e.what.nbytes for e in events if isinstance(e.what, Operation) and not e.what.flops)
    assert moved > 13 * 2 * 8 * 4096 * 4096


def test_gemma_2_is_planned() -> None:
    """Two kinds of layers, capped scores, norms on both sides of a branch."""
    run = run_of(model={"attn_logit_softcapping": 50.0, "sliding_window": 64, "window_attn_skip_freq": "2",
                        "layernorm_placement": "both", "num_layers": 4})  # fmt: skip
    found = step_time(run, 1, CLUSTERS["h100"])
    assert found.seconds > step_time(run_of(model={"num_layers": 4}), 1, CLUSTERS["h100"]).seconds
    assert found.model_flops == step_flops(run.model, 16, 512)


@pytest.mark.parametrize("name", ["a100", "b200"])
def test_the_waterfall_adds_up(name: str) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    layout |= {"data_parallel_sharding_strategy": "optim_grads"}
    found = step_time(run_of(layout, batch=64), 16, CLUSTERS[name])
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=1e-12)
    assert {PEAK, BELOW, MEMORY, "tp", "bubble", "sharding", "optimizer"} <= found.parts.keys()
    assert min(found.parts.values()) > 0
    assert found.mfu == pytest.approx(found.model_flops / found.seconds / 16 / CLUSTERS[name].matmul)


def test_a_pass_takes_no_less_than_the_host_needs_to_ask_for_it() -> None:
    """What the GPU does meanwhile costs nothing; a recorded step is asked for at once."""
    slow, run = FREE.replace(call=1.0), run_of({"tensor_model_parallel_size": 2}, batch=2)
    told = step_time(run, 2, slow)
    z = sizes_of(run.model, Mesh.planned(run.parallel, 0, 2), run.optimizer, Work(512, 2, device="cuda"))
    first, layer, last = map(pieces_run(z, again=False).of_part, range(3))
    every = [event.what for event in [*first, *(8 * layer), *last]]
    calls = sum(isinstance(what, Operation | Sent) for what in every)
    assert told.seconds == pytest.approx(calls, rel=1e-6)
    assert told.parts[LAUNCHES] == pytest.approx(calls - step_time(run, 2, FREE).seconds, rel=1e-6)
    recorded = dataclasses.replace(run, training=run.training.replace(cuda_graph_impl="local"))
    assert step_time(recorded, 2, slow) == step_time(run, 2, FREE)


@pytest.mark.parametrize("splits", [False, True])
def test_a_large_micro_batch_is_extrapolated_from_small_ones_that_wait_for_the_host(splits: bool) -> None:
    """What the rank does grows with the samples, and what the host does does not."""
    config, plan = family_config("llama", **SIZES), plan_stages(ParallelConfig(), 8)

    def pieces(samples: int) -> Pieces:
        z = sizes_of(config, Mesh.serial(), OptimizerConfig(), Work(512, samples, device="cuda"))
        return Pieces(z, CLUSTERS["h100"].replace(call=1e-5), splits)

    one, two, many = map(pieces, (1, 2, 64))
    told, found = many.stage(plan, 0), one.extended(two, 64).stage(plan, 0)
    small = two.stage(plan, 0).parts
    assert small[LAUNCHES] > 0.3 * sum(small.values()) and told.parts.get(LAUNCHES, 0.0) < 0.01 * told.forward
    for time in ("forward", "backward", "weights"):
        assert getattr(found, time) == pytest.approx(getattr(told, time), rel=1e-3), time
    assert found.parts == pytest.approx(told.parts, rel=1e-3)


PIPELINES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_v", 2)]


def stages_of(name: str, v: int, m: int, uneven: bool) -> tuple[Any, Any, list[PassTime]]:
    layout = ParallelConfig.from_dict(
        {"pipeline_model_parallel_size": 4, "pipeline_schedule": name}
        | ({"num_virtual_stages_per_pipeline_rank": v} if name == "interleaved" else {})
    )
    config = family_config("llama", **{**SIZES, "num_layers": 16})
    plan = plan_stages(layout, 16)
    z = sizes_of(config, Mesh.planned(layout, 0, 4), OptimizerConfig(), Work(512, 2, m))
    stages = [PassTime(1.0 + uneven * i % 3, 2.0 + uneven * i % 5, 1.0, {}) for i in range(4 * v)]
    return plan, z, stages


@pytest.mark.parametrize("name, v", PIPELINES)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("m", [8, 32, 44])
def test_a_long_batch_is_played_in_part_and_takes_as_long(name: str, v: int, uneven: bool, m: int) -> None:
    plan, z, stages = stages_of(name, v, m, uneven)
    split = name in SPLIT
    costs = Costs(
        [s.forward for s in stages],
        [s.backward - split * s.weights for s in stages],
        [split * s.weights for s in stages],
    )
    whole = simulate(schedule_of(plan, z.mesh.parallel, m), costs)
    seconds, busiest = play(plan, z, FREE, stages, m)
    busy = [sum(stages[s].forward + stages[s].backward for s in row) for row in placement_of(plan)]
    assert seconds == pytest.approx(float(whole.makespan), rel=1e-9)
    assert busy[busiest] == max(busy)


@pytest.mark.parametrize("name, v", PIPELINES[:4])
def test_equal_stages_have_the_bubble_of_the_closed_form(name: str, v: int) -> None:
    plan, z, stages = stages_of(name, v, 64, False)
    seconds, _ = play(plan, z, FREE, stages, 64)
    assert seconds == pytest.approx(64 * 3.0 * v * (1 + float(bubble(4, 64, v))), rel=1e-9)


SLOW = dataclasses.replace(CLUSTERS["h100"], gpus_per_node=1, between=1e9)


def test_gradients_hide_behind_the_last_backward_pass_only_where_they_may() -> None:
    at_once = {"data_parallel_sharding_strategy": "optim", "ddp_bucket_size": 10**6, "overlap_grad_reduce": True}
    waits = step_time(run_of({"data_parallel_sharding_strategy": "optim"}), 4, SLOW).parts["gradients"]
    hides = step_time(run_of(at_once), 4, SLOW).parts["gradients"]
    assert 0 < hides < waits


def test_zero_3_pays_for_weights_in_every_microbatch() -> None:
    least, most = (
        step_time(run_of({"data_parallel_sharding_strategy": strategy}), 4, SLOW).parts
        for strategy in ("optim", "optim_grads_params")
    )
    assert "sharding" in most and "sharding" not in least and "weights" in least and "weights" not in most
    fewer = run_of({"data_parallel_sharding_strategy": "optim_grads_params"}, batch=8)
    assert most["sharding"] == pytest.approx(2 * step_time(fewer, 4, SLOW).parts["sharding"], rel=1e-9)


def test_what_travels_beside_a_product_costs_nothing_until_it_takes_longer() -> None:
    fast, slow = (
        step_time(run_of({"tensor_model_parallel_size": 2}), 2, dataclasses.replace(CLUSTERS["h100"], inside=rate))
        for rate in (1e15, 1e9)
    )
    assert slow.parts["tp"] > 10 * fast.parts["tp"]
