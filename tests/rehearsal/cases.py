"""What is rehearsed: command lines of `pretrain_gpt`, by name, as data.

Every case compares losses and gradient norms with plain CPUs. Tolerances are relative, by what may differ: a kernel
rounds in another order than torch, and where experts are chosen a rounding may choose another one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SHORT = (
    "--mock-data --seq-length 32 --train-iters 2 --lr 1e-3 --vocab-size 128 --micro-batch-size 2 --global-batch-size 4 "
    "--seed 7 --hidden-dropout 0 --attention-dropout 0 --num-layers 2 --hidden-size 64 --num-attention-heads 4"
)
_LLAMA = (
    " --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --ffn-hidden-size 96"
    " --untie-embeddings-and-output-weights"
)
GPT2 = SHORT + " --ffn-hidden-size 96"
LLAMA = SHORT + _LLAMA + " --num-query-groups 2 --group-query-attention"
MOE = LLAMA + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"
MLA = SHORT + _LLAMA + (
    " --multi-latent-attention --kv-lora-rank 32 --q-lora-rank 48 --qk-head-dim 16 --qk-pos-emb-head-dim 16"
    " --v-head-dim 16"
)  # fmt: skip
HYBRID = " --hybrid-override-pattern M* --mamba-num-groups 2 --mamba-head-dim 16 --mamba-state-dim 8"
AWARE = " --use-precision-aware-optimizer"
OFFLOAD = " --optimizer-cpu-offload"
FP8 = " --bf16 --kernels torch --fp8-format hybrid"
TORCH = " --bf16 --kernels torch"
GRAPH = " --bf16 --enable-cuda-graph --cuda-graph-warmup-steps 1 --train-iters 4"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        line: what is trained; or a dict of options for `generation.outcome`.
        fast: belongs to every `make test`.
        tolerance: of losses; gradient norms may be off ten times as much.
        nproc: ranks.
        flash_attn: with the stand-in for the package.
    """

    line: str | dict[str, Any]
    fast: bool = False
    tolerance: float = 1e-3
    nproc: int = 1
    flash_attn: bool = False


ONE_RANK = {
    # dtypes, with torch's operators and with the kernels
    "llama fp32": Case(LLAMA + " --kernels torch", tolerance=1e-5),
    "llama fp32, kernels": Case(LLAMA, tolerance=1e-5),
    "llama bf16": Case(LLAMA + TORCH, fast=True),
    "llama bf16, kernels": Case(LLAMA + " --bf16", fast=True),
    "llama fp16, kernels": Case(LLAMA + " --fp16 --initial-loss-scale 1024"),
    "gpt2 fp32": Case(GPT2 + " --kernels torch", tolerance=1e-5),
    "gpt2 bf16, kernels": Case(GPT2 + " --bf16"),
    "gpt2 fp16": Case(GPT2 + " --fp16 --kernels torch --initial-loss-scale 1024"),
    "gpt2 bf16, dropout": Case(GPT2.replace("dropout 0", "dropout 0.1") + TORCH, fast=True, tolerance=0.05),
    "qwen2 bf16": Case(LLAMA + TORCH + " --add-qkv-bias --rotary-base 1000000"),
    "qwen3 bf16": Case(LLAMA + TORCH + " --qk-layernorm"),
    "squared relu, bf16": Case(GPT2 + TORCH + " --squared-relu --num-query-groups 1 --group-query-attention"),
    # who sees whom
    "window": Case(LLAMA + TORCH + " --sliding-window 8"),
    "documents": Case(LLAMA + TORCH + " --reset-attention-mask --reset-position-ids --eod-mask-loss"),
    "flash-attn": Case(LLAMA + TORCH, flash_attn=True),
    "flash-attn, window": Case(LLAMA + TORCH + " --sliding-window 8", flash_attn=True),
    "flash-attn, documents": Case(
        LLAMA + TORCH + " --reset-attention-mask --reset-position-ids --eod-mask-loss", flash_attn=True
    ),
    "reference attention": Case(LLAMA + TORCH + " --attention-backend reference"),
    "local attention": Case(LLAMA + TORCH + " --attention-backend local"),
    "local attention, kernels": Case(LLAMA + " --bf16 --attention-backend local"),
    # hybrids
    "hybrid": Case(LLAMA + HYBRID + TORCH, tolerance=1e-2),
    "hybrid fp32, documents": Case(
        LLAMA + HYBRID + " --kernels torch --reset-attention-mask --reset-position-ids --eod-mask-loss", tolerance=1e-5
    ),
    "hybrid, a recorded step": Case(LLAMA + HYBRID + GRAPH, tolerance=1e-2),
    # recompute
    "recompute full": Case(
        LLAMA + TORCH + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "recompute selective, dropout": Case(
        GPT2.replace("dropout 0", "dropout 0.1") + TORCH + " --recompute-granularity selective", tolerance=0.05
    ),
    # FP8
    "fp8 delayed": Case(LLAMA + FP8 + " --fp8-amax-history-len 16 --fp8-amax-compute-algo max", fast=True),
    "fp8 delayed, kernels": Case(LLAMA + " --bf16 --fp8-format hybrid --fp8-amax-history-len 4"),
    "fp8 tensorwise, first layer in bf16": Case(
        LLAMA + FP8 + " --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 "
        "--num-layers-at-end-in-bf16 0"
    ),
    "fp8 tensorwise": Case(LLAMA + FP8 + " --fp8-recipe tensorwise"),
    "fp8 tensorwise, no wgrad": Case(LLAMA + FP8 + " --fp8-recipe tensorwise --no-fp8-wgrad"),
    "fp8 blockwise": Case(
        LLAMA + TORCH + " --fp8-format e4m3 --fp8-recipe blockwise --hidden-size 128 --ffn-hidden-size 128 "
        "--seq-length 64"
    ),
    "fp8 mxfp8": Case(LLAMA + TORCH + " --fp8-format e4m3 --fp8-recipe mxfp8"),
    # experts
    "moe": Case(MOE + TORCH, fast=True, tolerance=1e-2),
    "moe, kernels": Case(MOE + " --bf16", tolerance=1e-2),
    "moe fp32": Case(MOE + " --kernels torch", tolerance=1e-5),
    "moe, grouped": Case(MOE + TORCH + " --moe-grouped-gemm", tolerance=1e-2),
    "moe, aux loss and capacity": Case(
        MOE + TORCH + " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
        "--moe-expert-capacity-factor 1.0",
        tolerance=1e-2,
    ),
    "moe, padded to capacity": Case(
        MOE + TORCH + " --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", tolerance=1e-2
    ),
    "moe, sinkhorn": Case(
        MOE.replace("topk 2", "topk 1") + TORCH + " --moe-router-load-balancing-type sinkhorn", tolerance=1e-2
    ),
    "moe, sequence aux loss and z loss": Case(
        MOE + TORCH + " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
        "--moe-z-loss-coeff 1e-3",
        tolerance=1e-2,
    ),
    "moe, sigmoid and bias": Case(
        MOE + TORCH + " --moe-router-score-function sigmoid --moe-router-enable-expert-bias", tolerance=1e-2
    ),
    "moe, groups of experts": Case(
        MOE + TORCH + " --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-score-function sigmoid",
        tolerance=1e-2,
    ),
    "moe, shared expert with a gate": Case(
        MOE + TORCH + " --moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate", tolerance=1e-2
    ),
    "moe, fp8": Case(MOE + FP8 + " --fp8-recipe tensorwise", tolerance=1e-2),
    "moe, recompute": Case(
        MOE + TORCH + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        tolerance=1e-2,
    ),
    # DeepSeek
    "mla": Case(MLA + TORCH),
    "mla, kernels": Case(MLA + " --bf16"),
    "mla, experts and mtp": Case(
        MLA + TORCH + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --mtp-num-layers 1",
        tolerance=1e-2,
    ),
    "mtp of two depths": Case(LLAMA + TORCH + " --mtp-num-layers 2"),
    # the step
    "sgd": Case(LLAMA + TORCH + " --optimizer sgd"),
    "moments in bf16 and fp8": Case(LLAMA + TORCH + AWARE + " --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", fast=True),
    "main parameters and moments in fp16": Case(
        LLAMA + TORCH + AWARE + " --main-params-dtype fp16 --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"
    ),
    "gradients in bf16": Case(LLAMA + TORCH + AWARE + " --main-grads-dtype bf16", tolerance=1e-2),
    "offload, overlapped": Case(
        LLAMA + TORCH + OFFLOAD + " --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d", fast=True
    ),
    "offload of all, fp32, kernels": Case(LLAMA + OFFLOAD + " --no-pin-cpu-grads", tolerance=1e-5),
    "evaluation": Case(LLAMA + TORCH + " --eval-interval 1 --eval-iters 1"),
    "zeros, check of replicas": Case(LLAMA + TORCH + " --log-num-zeros-in-grad --check-replicas-interval 1"),
    # a step as a CUDA graph
    "graph": Case(LLAMA + GRAPH + " --kernels torch", fast=True),
    "graph, kernels": Case(LLAMA + GRAPH),
    "graph, window": Case(LLAMA + GRAPH + " --kernels torch --sliding-window 8"),
    "graph, fp8 delayed": Case(LLAMA + GRAPH + " --kernels torch --fp8-format hybrid --fp8-amax-history-len 16"),
    "graph, fp8 tensorwise": Case(LLAMA + GRAPH + " --kernels torch --fp8-format hybrid --fp8-recipe tensorwise"),
    "graph, mla": Case(MLA + GRAPH + " --kernels torch"),
    "graph, gpt2": Case(GPT2 + GRAPH + " --kernels torch"),
    "graph, sgd": Case(LLAMA + GRAPH + " --kernels torch --optimizer sgd"),
    # prompts continued
    "generate": Case({"family": "llama", "num_query_groups": 2}),
    "generate, graph": Case({"family": "llama", "num_query_groups": 2, "graph": True}, fast=True),
    "generate, sampled": Case({"family": "llama", "num_query_groups": 2, "sampled": True}),
    "generate, sampled, graph": Case({"family": "llama", "num_query_groups": 2, "sampled": True, "graph": True}),
    "generate gpt2, graph": Case({"family": "gpt2", "graph": True}),
}

FOUR = " --num-layers 4 --global-batch-size 8"
PIPE = FOUR + " --pipeline-model-parallel-size 2"


def _ranks(nproc: int, line: str, **fields: Any) -> Case:
    return Case(line, nproc=nproc, **fields)


LAYOUTS = {
    "tp 2, sp": _ranks(2, LLAMA + TORCH + " --tensor-model-parallel-size 2 --sequence-parallel", fast=True),
    "tp 2, sp, kernels": _ranks(2, LLAMA + " --bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "tp 2": _ranks(2, GPT2 + TORCH + " --tensor-model-parallel-size 2"),
    "dp 2, overlap": _ranks(
        2,
        LLAMA + TORCH + " --overlap-grad-reduce --ddp-bucket-size 20000 --check-replicas-interval 1",
        fast=True,
    ),
    "pp 2, gpipe": _ranks(2, LLAMA + TORCH + PIPE + " --pipeline-schedule gpipe"),
    "pp 2, 1f1b, tied": _ranks(2, GPT2 + TORCH + PIPE, fast=True),
    "pp 2, interleaved, evaluated": _ranks(
        2,
        LLAMA + TORCH + PIPE + " --num-layers-per-virtual-pipeline-stage 1 --eval-interval 1 --eval-iters 1",
    ),
    "pp 2, zb_h1, variable lengths": _ranks(
        2, LLAMA + TORCH + PIPE + " --pipeline-schedule zb_h1 --variable-seq-lengths"
    ),
    "pp 2, zb_v": _ranks(2, LLAMA + TORCH + PIPE + " --pipeline-schedule zb_v"),
    "pp 2, dualpipe_v": _ranks(2, LLAMA + TORCH + PIPE + " --pipeline-schedule dualpipe_v"),
    "pp 2, experts": _ranks(2, MOE + TORCH + PIPE, tolerance=1e-2),
    "pp 2, mtp": _ranks(2, LLAMA + TORCH + PIPE + " --mtp-num-layers 1"),
    "cp 2, ring": _ranks(2, LLAMA + TORCH + " --context-parallel-size 2", fast=True),
    "cp 2, ring, documents": _ranks(2, LLAMA + TORCH + " --context-parallel-size 2 --reset-attention-mask"),
    "cp 2, ring, window": _ranks(2, LLAMA + TORCH + " --context-parallel-size 2 --sliding-window 8"),
    "cp 2, allgather": _ranks(2, LLAMA + TORCH + " --context-parallel-size 2 --cp-comm-type allgather"),
    "cp 2, a2a": _ranks(2, LLAMA + TORCH + " --context-parallel-size 2 --cp-comm-type a2a"),
    "cp 2, mla": _ranks(2, MLA + TORCH + " --context-parallel-size 2"),
    "ep 2, alltoall": _ranks(
        2,
        MOE + TORCH + " --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
        fast=True,
        tolerance=1e-2,
    ),
    "ep 2, allgather": _ranks(
        2, MOE + TORCH + " --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather", tolerance=1e-2
    ),
    "ep 2, grouped, kernels": _ranks(
        2, MOE + " --bf16 --expert-model-parallel-size 2 --moe-grouped-gemm", tolerance=1e-2
    ),
    "tp 2, etp 2": _ranks(
        2,
        MOE + TORCH + " --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
        tolerance=1e-2,
    ),
    "tp 2, etp 1": _ranks(
        2,
        MOE + TORCH + " --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        tolerance=1e-2,
    ),
    "tp 2, fp8 delayed": _ranks(
        2,
        LLAMA + FP8 + " --tensor-model-parallel-size 2 --sequence-parallel --fp8-amax-history-len 16 "
        "--fp8-amax-compute-algo max",
    ),
    "tp 2, fp8 tensorwise": _ranks(
        2, LLAMA + FP8 + " --tensor-model-parallel-size 2 --sequence-parallel --fp8-recipe tensorwise"
    ),
    "dp 2, dropout, recompute": _ranks(
        2,
        GPT2.replace("dropout 0", "dropout 0.1")
        + TORCH
        + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        tolerance=0.05,
    ),
    "tp 2, ep 2, shared experts overlapped": _ranks(
        4,
        MOE + TORCH + " --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 48 --moe-shared-expert-overlap",
        tolerance=1e-2,
    ),
    "tp 2, pp 2": _ranks(4, LLAMA + TORCH + PIPE + " --tensor-model-parallel-size 2 --sequence-parallel"),
    "cp 2, dp 2": _ranks(4, LLAMA + TORCH + " --context-parallel-size 2 --overlap-grad-reduce"),
    "pp 4, zb_v": _ranks(
        4,
        (LLAMA + TORCH + FOUR + " --pipeline-model-parallel-size 4 --pipeline-schedule zb_v").replace(
            "--num-layers 4", "--num-layers 8"
        ),
    ),
    "cp 4, a2a and ring": _ranks(
        4,
        LLAMA + TORCH + " --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    ),
}
