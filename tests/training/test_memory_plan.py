"""The memory that is predicted for a rank, beside what is alive on it in a step."""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.comm.mesh import Mesh
from minimegatron.config import DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from minimegatron.memory import Tracker
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.zoo import family_config
from minimegatron.optim.optimizer import build_optimizer
from minimegatron.parallel.wrapping import data_parallel
from minimegatron.training.memory_plan import predict
from minimegatron.training.run import RunConfig
from tests.twin import Case, accumulate

MICROBATCHES, BATCH, LENGTH = 4, 2, 64
SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
FULL = {"recompute_granularity": "full"}
BF16 = {"params_dtype": "bf16", "untie_embeddings_and_output_weights": True}
STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# name -> (ranks, fields of the layout, fields of the model)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    **{f"stage {n}": (2, {"data_parallel_sharding_strategy": s}, {}) for s, n in STAGES.items()},
    **{f"stage {n}, recompute": (2, {"data_parallel_sharding_strategy": s}, FULL) for s, n in STAGES.items()},
    **{f"stage {n}, bf16": (2, {"data_parallel_sharding_strategy": s}, BF16) for s, n in STAGES.items()},
    "stage 3, overlap": (2, {"data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True}, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}, {}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "tp2 sp, stage 1": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
                        | {"data_parallel_sharding_strategy": "optim"}, {}),
    "tp2 sp, bf16, recompute": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, BF16 | FULL),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, {}),
    "pp2, bf16": (2, {"pipeline_model_parallel_size": 2}, BF16),
    "pp2 interleaved": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, {}),
    "pp2, stage 1": (4, {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}, {}),
}  # fmt: skip


def run_of(name: str) -> tuple[int, RunConfig]:
    """Ranks of a layout, and its run."""
    world, layout, model = LAYOUTS[name]
    sharded = layout.get("data_parallel_sharding_strategy", "no_shard") != "no_shard"
    parallel = ParallelConfig(**layout, use_distributed_optimizer=sharded)
    return world, RunConfig(
        family_config("llama", **{**SIZES, **model}),
        parallel,
        data=DataConfig(mock_data=True, seq_length=LENGTH),
        training=TrainingConfig(
            micro_batch_size=BATCH, global_batch_size=MICROBATCHES * BATCH * parallel.data_parallel_size(world)
        ),
    )


def measured(rank: int, world: int, name: str) -> tuple[dict[str, int], dict[str, int], str]:
    """Bytes by owner between steps and at the peak of the second step; and where that was."""
    _, run = run_of(name)
    mesh = Mesh.build(run.parallel)
    _, layout, model = LAYOUTS[name]
    case = Case({}, {**SIZES, **model}, accumulation=MICROBATCHES, seq_length=LENGTH, micro_batch_size=BATCH)
    ddp = data_parallel(build_model_chunks(run.model, mesh, 0), mesh)
    optimizer = build_optimizer(OptimizerConfig(), ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    accumulate(ddp, case, mesh)
    optimizer.step()
    held = {**ddp.held(), **optimizer.held()}
    with Tracker(held) as tracker:
        accumulate(ddp, case, mesh)
        optimizer.step()
    storages = {
        owner: {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        for owner, tensors in held.items()
    }
    lasting = {owner: sum(of.values()) for owner, of in storages.items() if sum(of.values())}
    return lasting, dict(tracker.peak.owners), tracker.peak.where


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_states_are_predicted_exactly_and_the_peak_within_three_percent(ranks: Any, name: str) -> None:
    world, run = run_of(name)
    for rank, (lasting, peak, _) in enumerate(ranks(world).run(measured, name)):
        told = predict(run, rank, world)
        assert told.unknown == ()
        assert told.lasting == lasting
        assert told.total == pytest.approx(sum(peak.values()), rel=0.03), f"rank {rank}: {told} {peak}"
