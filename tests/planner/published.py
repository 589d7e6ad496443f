"""Published runs as configurations: their models, layouts, and what they took."""

from __future__ import annotations

from typing import Any

from minimegatron.config import DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig, TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.training.arguments import parse_args


def run_of(
    h: int, layers: int, heads: int, words: int, s: int, batch: int, micro: int, layout: dict[str, Any], **model: Any
) -> RunConfig:
    """A GPT in bf16 with an MLP of 4 h."""
    config = TransformerConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, vocab_size=words, max_position_embeddings=s,
        params_dtype="bf16", activation="gelu_tanh", **model,
    )  # fmt: skip
    old = config.attention_backend == "reference"
    return RunConfig(
        config,
        ParallelConfig.from_dict(layout),
        OptimizerConfig(),
        DataConfig(mock_data=True, seq_length=s),
        TrainingConfig(micro_batch_size=micro, global_batch_size=batch),
        spec=("minimegatron.planner.closed_forms", "fused_softmax") if old else None,
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

# Megatron-LM's README of July 2024, H100, V = 131,072, s = 4,096; its counter added the full square of attention (the
# half since March 2025): h, L, heads, tp, pp, GPUs, batch, TFLOP/s a GPU.
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
    "314B": (4, 12), "462B": (4, 7),
}  # fmt: skip


# arXiv 2407.21783, table 4, Llama 3 405B on H100, batches of 16 Mi tokens, tp 8, pp 16: cp, tokens of a sequence, GPUs,
# TFLOP/s a GPU. Its first and its last stage have a layer less than the others. Not published are chunks (taken: 4, two
# layers each), the micro-batch (taken: 1) and how attention was counted (taken: half of the square).
LLAMA_405B = {"8k": (1, 8192, 8192, 430), "8k, 16,384 GPUs": (1, 8192, 16384, 400), "128k": (16, 131072, 16384, 380)}

# arXiv 2312.12391, measured with Megatron-DeepSpeed on A100, nodes of 8 with 4 cards of 200 Gb/s, full recompute:
# h, L, heads, tp, pp, GPUs, s, batch, micro-batch, seconds. Every tenth row of data/ground_truth_multi.csv in
# github.com/VIA-Research/vTrain, and every 120th from the fifth on of ground_truth_single.csv.
NODES_A100 = [
    (3072, 30, 32, 1, 1, 64, 2048, 512, 8, 3.5665),
    (3072, 30, 32, 4, 1, 64, 2048, 512, 4, 4.764),
    (3072, 30, 32, 8, 1, 64, 2048, 512, 2, 8.8809),
    (6144, 40, 48, 4, 2, 256, 2048, 1024, 8, 10.8563),
    (6144, 40, 48, 8, 8, 256, 2048, 1024, 32, 16.2414),
    (8192, 48, 64, 2, 16, 512, 2048, 1536, 3, 26.1888),
    (8192, 48, 64, 4, 16, 512, 2048, 1536, 4, 15.5855),
    (8192, 48, 64, 4, 16, 512, 2048, 1536, 6, 20.0441),
    (8192, 48, 64, 2, 16, 512, 2048, 1536, 6, 27.2284),
    (12288, 96, 96, 4, 32, 512, 2048, 1536, 2, 53.9096),
    (12288, 96, 96, 8, 16, 512, 2048, 1536, 3, 55.6775),
]
NODE_A100 = [
    (1024, 16, 16, 1, 4, 8, 1024, 4, 1, 0.0772),
    (2048, 20, 16, 4, 2, 8, 1024, 4, 1, 0.1656),
    (1024, 24, 16, 1, 2, 4, 1024, 16, 2, 0.238),
    (1024, 16, 16, 1, 2, 2, 1024, 2, 1, 0.0884),
    (2048, 16, 16, 2, 1, 2, 1024, 4, 1, 0.243),
    (2048, 12, 16, 2, 1, 4, 1024, 32, 8, 0.294),
    (1024, 16, 16, 1, 4, 8, 1024, 8, 2, 0.0892),
    (1024, 24, 16, 1, 1, 2, 1024, 16, 1, 0.6416),
    (2048, 12, 16, 1, 4, 4, 1024, 16, 1, 0.3601),
    (2048, 24, 16, 1, 2, 2, 1024, 16, 8, 0.7467),
    (1024, 12, 16, 1, 2, 8, 1024, 16, 1, 0.1203),
    (2048, 16, 16, 1, 2, 8, 1024, 32, 4, 0.3012),
]


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


def llama_405b(name: str) -> tuple[int, RunConfig, float]:
    """GPUs, the run, TFLOP/s."""
    cp, s, gpus, tflops = LLAMA_405B[name]
    flags = f"""--preset llama3-405b --bf16 --seq-length {s} --micro-batch-size 1 --global-batch-size {2**24 // s}
        --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size {cp}
        --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 4
        --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"""
    return gpus, parse_args(flags.split(), gpus, reads=False), tflops


def measured_a100(row: tuple[Any, ...]) -> tuple[int, RunConfig, float]:
    """GPUs, the run, seconds."""
    h, layers, heads, tp, pp, gpus, s, batch, micro, seconds = row
    run = run_of(h, layers, heads, 50_257, s, batch, micro, layout_of(tp, pp), **OLD, **FULL)
    return gpus, run, seconds
