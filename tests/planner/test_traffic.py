"""What a step sends, told beforehand, beside what a traced step counts: every call and every byte, on every rank."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch
from minimegatron.config import DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError
from minimegatron.footprint.events import Unpredicted
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.families import family_config
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.planner.traffic import run_messages
from minimegatron.training.memory_report import spec_of, work_of_run
from minimegatron.training.rules import check_run
from minimegatron.training.step import forward_step, train_step
from tests.thorough import SLOW, THOROUGH

LENGTH, WORDS = 32, 96
SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
    "vocab_size": WORDS, "make_vocab_size_divisible_by": 4,
}  # fmt: skip
EQUAL = {  # experts whose loads are equal, whatever the router says
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}  # fmt: skip
LATENT = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8,
          "qk_pos_emb_head_dim": 4, "v_head_dim": 12, "num_query_groups": 4}  # fmt: skip
TWO = SIZES | {"num_layers": 2}
ENDS = (0, 3)  # of four ranks: the first and the last of every axis
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
AXES = ("tensor_model", "context", "pipeline_model", "expert_model")


def drawn(seed: int, world: int = 4) -> RunConfig:
    """A run with a layout that the rules allow, drawn until one is."""
    dice = random.Random(seed)
    while True:
        tp, cp, pp, ep = (dice.choice((1, 1, 2, 4)) for _ in AXES)
        experts = dice.random() < 0.4
        parallel: dict[str, Any] = dict(zip((f"{a}_parallel_size" for a in AXES), (tp, cp, pp, ep), strict=True))
        parallel |= {
            "sequence_parallel": tp > 1 and dice.random() < 0.7,
            "cp_comm_type": dice.choice(("p2p", "allgather", "a2a")),
            "data_parallel_sharding_strategy": dice.choice(STRATEGIES),
            "overlap_grad_reduce": dice.random() < 0.5,
        }
        if pp > 1:
            parallel["pipeline_schedule"] = dice.choice(("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"))
        if experts and dice.random() < 0.5:
            parallel["expert_tensor_parallel_size"] = dice.choice((1, tp))
        again = dice.choice(({}, {"recompute_granularity": "full"}, {"recompute_granularity": "selective",
                             "recompute_modules": ("core_attn", "moe" if experts else "mlp")}))  # fmt: skip
        model = {**SIZES, **(EQUAL if experts else {}), **(LATENT if dice.random() < 0.2 else {}), **again}
        model |= {"params_dtype": dice.choice(("fp32", "bf16")), "qk_layernorm": dice.random() < 0.2}
        model |= {"untie_embeddings_and_output_weights": dice.random() < 0.5}
        if experts:
            model |= {"moe_token_dispatcher_type": dice.choice(("alltoall", "allgather"))}
            model |= {"moe_router_load_balancing_type": dice.choice(("aux_loss", "seq_aux_loss", "global_aux_loss"))}
            model |= {"moe_aux_loss_coeff": 0.01, "moe_shared_expert_intermediate_size": dice.choice((None, 32))}
        try:
            run = run_of(parallel, model, world)
            for rank in range(world):
                told(run, rank, world)
            return run
        except (ConfigError, Unpredicted):
            continue


def run_of(parallel: dict[str, Any], model: dict[str, Any], world: int, microbatches: int = 4) -> RunConfig:
    layout = ParallelConfig.from_dict(parallel)
    run = RunConfig(
        family_config("llama", **model),
        layout,
        OptimizerConfig(),
        DataConfig(mock_data=True, seq_length=LENGTH),
        TrainingConfig(micro_batch_size=2, global_batch_size=2 * microbatches * layout.data_parallel_size(world)),
    )
    check_run(run, world, reads=True)
    return run


def traced(rank: int, world: int, runs: list[RunConfig]) -> list[dict[str, dict[str, int]]]:
    """What the second step of each run sends."""
    return [_second_step(rank, run) for run in runs]


def _second_step(rank: int, run: RunConfig) -> dict[str, dict[str, int]]:
    mesh = Mesh.build(run.parallel)
    ddp = data_parallel(build_model_chunks(run.model, mesh, 0, spec_of(run)), mesh)
    optimizer = build_optimizer(run.optimizer, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    schedule = Schedule.from_config(run.optimizer, global_batch_size=1, train_iters=10)
    scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule)

    count = work_of_run(run, mesh.world.size, "cpu").microbatches

    def step() -> None:
        data = iter([microbatch(mesh) for _ in range(count)])
        train_step(forward_step, data, ddp, optimizer, scheduler, count)

    step()
    with trace.record(rank) as log:
        step()
    return log.summary()


def microbatch(mesh: Mesh) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * (LENGTH + 1)).view(2, -1) * 7 % WORDS
    return cut_batch({"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(2, LENGTH)}, mesh)


def told_and_counted(ranks: Any, runs: list[RunConfig], world: int, places: Sequence[int] | None = None) -> None:
    """On every rank, or in these places of the world."""
    counted = ranks(world).run(traced, runs, timeout=200)
    for number, run in enumerate(runs):
        for rank in places or range(world):
            assert told(run, rank, world) == counted[rank][number], f"rank {rank} of {run.parallel} {run.model}"


@functools.cache
def told(run: RunConfig, rank: int, world: int) -> dict[str, dict[str, int]]:
    """The same as `trace.Log.summary`."""
    table: dict[str, dict[str, int]] = {}
    for (message, _), count in run_messages(run, rank, world, "cpu").items():
        cell = table.setdefault(f"{message.name}/{message.axis}", {"count": 0, "nbytes": 0})
        cell["count"] += count
        cell["nbytes"] += count * message.nbytes
    return dict(sorted(table.items()))


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(i, i + 3), marks=THOROUGH if i else SLOW) for i in range(0, 60, 3)]
)
def test_random_layouts(ranks: Any, seeds: range) -> None:
    told_and_counted(ranks, [drawn(seed) for seed in seeds], 4)


NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({"context_parallel_size": 2}, {}),
    "heads inside, a ring outside": ({"context_parallel_size": 4, "cp_comm_type": "a2a+p2p",
                                      "hierarchical_context_parallel_sizes": (2, 2)},
                                     {"recompute_granularity": "selective"}),
    "etp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}, EQUAL),
    "instances": ({"data_parallel_sharding_strategy": "optim", "num_distributed_optimizer_instances": 2}, {}),
    "buckets": ({"data_parallel_sharding_strategy": "optim", "overlap_grad_reduce": True, "ddp_bucket_size": 2000}, {}),
    "dropout": ({"tensor_model_parallel_size": 4}, {"hidden_dropout": 0.1, "recompute_granularity": "full"}),
    "one group on four ranks": ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, {"num_query_groups": 1}),
    "a gate": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, EQUAL | {
        "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "recompute_granularity": "full"}),
    "shared overlap": ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
                       EQUAL | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True,
                                "moe_token_dispatcher_type": "alltoall", "recompute_granularity": "full"}),
    "a norm over all heads": ({"tensor_model_parallel_size": 2}, {
        "layernorm_placement": "output", "qk_layernorm": True, "qk_layernorm_over_heads": True,
        "recompute_granularity": "full"}),
    "capped scores": ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, {
        "layernorm_placement": "both", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "sliding_window": 8, "window_attn_skip_freq": "2", "scale_embeddings": True}),
}  # fmt: skip


# Of each kind of message one: rings inside heads, groups of replicas, an overlapped shared expert, a norm's own sum.
ORDINARY = ["heads inside, a ring outside", "instances", "shared overlap", "a norm over all heads"]


@SLOW
@pytest.mark.parametrize("names", [ORDINARY[:2], ORDINARY[2:], pytest.param(list(NAMED), marks=THOROUGH)])
def test_named_layouts(ranks: Any, names: list[str]) -> None:
    runs = [run_of(parallel, TWO | model, 4, 2) for parallel, model in map(NAMED.__getitem__, names)]
    told_and_counted(ranks, runs, 4, ENDS)


STRANGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {"recompute_granularity": "full"}),
}  # fmt: skip


@pytest.mark.slow
def test_layers_that_the_package_does_not_know_send_what_a_traced_step_counts(ranks: Any) -> None:
    runs = [run_of(parallel, TWO | model, 4, 2) for parallel, model in STRANGE.values()]
    told_and_counted(
        ranks, [dataclasses.replace(run, spec=("tests.extension.retention", "gathering")) for run in runs], 4, ENDS
    )


def test_messages_of_a_model_with_frozen_parameters_are_not_told() -> None:
    run = RunConfig(family_config("llama", **SIZES), optimizer=OptimizerConfig(freeze=("*linear_fc*",)))
    with pytest.raises(Unpredicted, match="frozen"):
        run_messages(run, 0, 1)
