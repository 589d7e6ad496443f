"""Published runs as configurations: their models, layouts, and what they took."""

from __future__ import annotations

from typing import Any

from minimegatron.config import DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig, TransformerConfig
from minimegatron.training.run import RunConfig


def run_of(
    h: int, layers: int, heads: int, words: int, s: int, batch: int, micro: int, layout: dict[str, Any], **model: Any
) -> RunConfig:
    """A GPT in bf16 with an MLP of 4 h."""
    config = TransformerConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, vocab_size=words, max_position_embeddings=s,
        params_dtype="bf16", activation="gelu_tanh", **model,
    )  # fmt: skip
    return RunConfig(
        config,
        ParallelConfig.from_dict(layout),
        OptimizerConfig(),
        DataConfig(mock_data=True, seq_length=s),
        TrainingConfig(micro_batch_size=micro, global_batch_size=batch),
    )


def layout_of(tp: int, pp: int, v: int = 1, **more: Any) -> dict[str, Any]:
    """With v chunks of a rank."""
    found = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}
    return found | ({"num_virtual_stages_per_pipeline_rank": v} if v > 1 else {})


OLD = {"attention_backend": "reference", "hidden_dropout": 0.1, "attention_dropout": 0.1}  # all weights are kept
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}

# arXiv 2205.05198, tables 3 and 5, A100: h, L, heads, GPUs, batch, micro-batch, tp, pp, v, seconds with full recompute,
# seconds with sequence parallelism and selective recompute.
SELECTIVE_RUNS = {
    "22B": (6144, 48, 64, 8, 4, 4, 8, 1, 1, 1.42, 1.10),
    "175B": (12288, 96, 96, 64, 64, 1, 8, 8, 3, 18.13, 13.75),
    "530B": (20480, 105, 128, 280, 280, 1, 8, 35, 3, 49.05, 37.83),
    "1T": (25600, 128, 160, 512, 512, 1, 8, 64, 1, 94.42, 71.49),
}

# arXiv 2104.04473, table 1, A100; micro-batches and chunks of Megatron-LM's examples/sc21/run_table_1.sh. All with full
# recompute: h, L, heads, tp, pp, v, GPUs, batch, micro-batch, TFLOP/s a GPU.
WEAK_A100 = {
    "1.7B": (2304, 24, 24, 1, 1, 1, 32, 512, 16, 137),
    "3.6B": (3072, 30, 32, 2, 1, 1, 64, 512, 16, 138),
    "7.5B": (4096, 36, 32, 4, 1, 1, 128, 512, 16, 142),
    "18.4B": (6144, 40, 48, 8, 1, 1, 256, 1024, 8, 135),
    "39.1B": (8192, 48, 64, 8, 2, 1, 512, 1536, 4, 138),
    "76.1B": (10240, 60, 80, 8, 4, 3, 1024, 1792, 2, 140),
    "145.6B": (12288, 80, 96, 8, 8, 2, 1536, 2304, 2, 148),
    "310.1B": (16384, 96, 128, 8, 16, 2, 1920, 2160, 1, 155),
    "529.6B": (20480, 105, 128, 8, 35, 3, 2520, 2520, 1, 163),
    "1008B": (25600, 128, 160, 8, 64, 1, 3072, 3072, 1, 163),
}

# Megatron-LM's README, H100, V = 131,072, s = 4,096: h, L, heads, tp, pp, GPUs, batch, TFLOP/s a GPU.
WEAK_H100 = {
    "1.7B": (2048, 24, 16, 1, 1, 48, 192, 408.8),
    "7.1B": (4096, 30, 32, 2, 1, 96, 192, 465.9),
    "16B": (6144, 32, 48, 4, 1, 192, 192, 489.1),
    "32B": (7168, 48, 56, 8, 1, 384, 192, 459.6),
    "70B": (8192, 84, 64, 8, 2, 768, 384, 419.7),
    "119B": (10240, 92, 80, 8, 4, 1536, 768, 420.5),
    "177B": (12288, 96, 96, 8, 6, 2304, 1152, 432.8),
    "314B": (16384, 96, 128, 8, 8, 3072, 1536, 474.4),
    "462B": (18432, 112, 144, 8, 16, 6144, 3072, 459.9),
}
FASTEST = {  # micro-batch and chunks, which the README does not say: what the planner finds fastest
    "1.7B": (4, 1), "7.1B": (4, 1), "16B": (4, 1), "32B": (4, 1), "70B": (4, 14), "119B": (4, 23), "177B": (4, 16),
    "314B": (4, 12), "462B": (2, 7),
}  # fmt: skip


def selective_run(name: str, full: bool) -> tuple[int, RunConfig, float]:
    """GPUs, the run, and the seconds that were published."""
    h, layers, heads, gpus, batch, micro, tp, pp, v, slow, fast = SELECTIVE_RUNS[name]
    layout = layout_of(tp, pp, v, sequence_parallel=not full)
    run = run_of(h, layers, heads, 51_200, 2048, batch, micro, layout, **OLD, **(FULL if full else SELECTIVE))
    return gpus, run, slow if full else fast


def weak_a100(name: str) -> tuple[int, RunConfig, float]:
    """GPUs, the run, TFLOP/s."""
    h, layers, heads, tp, pp, v, gpus, batch, micro, tflops = WEAK_A100[name]
    layout = layout_of(tp, pp, v, overlap_grad_reduce=pp == 1)  # the script has DDP=torch there
    run = run_of(h, layers, heads, 51_200, 2048, batch, micro, layout, **OLD, **FULL)
    return gpus, run, tflops


def weak_h100(name: str, micro: int, v: int) -> tuple[int, RunConfig, float]:
    """GPUs, the run, TFLOP/s."""
    h, layers, heads, tp, pp, gpus, batch, tflops = WEAK_H100[name]
    more = {"sequence_parallel": tp > 1, "overlap_grad_reduce": True, "use_distributed_optimizer": True}
    layout = layout_of(tp, pp, v, overlap_param_gather=True, **more)
    model = {"untie_embeddings_and_output_weights": True}
    return gpus, run_of(h, layers, heads, 131_072, 4096, batch, micro, layout, **model), tflops
