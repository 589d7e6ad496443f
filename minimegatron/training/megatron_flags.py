"""Megatron-LM's flags that are not fields of ours, and what each means here, as data.

A command line written for Megatron-LM must have the same effect here, or stop. Four tables of flags make that possible;
other flags are made from the fields of `config/` (`arguments.py`).

| table         | the flag...                                            | on the command line        |
|---------------|--------------------------------------------------------|----------------------------|
| `SWITCHES`    | is another spelling of one value of a field            | sets it                    |
| `RENAMED`     | is another spelling of a field                         | sets it, converted         |
| `ALREADY`     | asks for what always happens here                      | accepted; one line says so |
| `UNSUPPORTED` | asks for something that minimegatron does not have yet | exit status 2              |

Flag names are those of `megatron/training/arguments.py` and `megatron/training/config/`, 2019 to 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from minimegatron.errors import ConfigError

# flag -> (field, value)
SWITCHES: dict[str, tuple[str, Any]] = {
    "--swiglu": ("activation", "swiglu"),
    "--squared-relu": ("activation", "squared_relu"),
    "--quick-geglu": ("activation", "quick_geglu"),
    "--openai-gelu": ("activation", "gelu_tanh"),
    "--bf16": ("params_dtype", "bf16"),
    "--accumulate-allreduce-grads-in-fp32": ("main_grads_dtype", "fp32"),
    "--fp16": ("params_dtype", "fp16"),
    "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--use-rope-scaling": ("rope_scaling_type", "llama3"),
    "--no-position-embedding": ("position_embedding_type", "none"),
    "--enable-cuda-graph": ("cuda_graph_impl", "local"),
    "--fp8-wgrad": ("fp8_wgrad", True),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--override-opt_param-scheduler": ("override_opt_param_scheduler", True),
    "--use-checkpoint-opt_param-scheduler": ("use_checkpoint_opt_param_scheduler", True),
}


def window_of(text: str) -> int:
    """Megatron's `--window-size left,right`: query i sees keys i - left ... i + right; ours counts the token itself."""
    words = text.strip("()").split(",")
    if len(words) != 2 or not all(word.strip().isdigit() for word in words) or int(words[1]) != 0:
        raise ConfigError(f"--window-size {text}: a causal window is `left,0`", fix="for example --window-size 4095,0")
    return int(words[0]) + 1


# flag -> (field, conversion, what stands for the value in the help)
RENAMED: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "--norm-epsilon": ("layernorm_epsilon", float, "X"),
    "--window-size": ("sliding_window", window_of, "LEFT,0"),
    "--decoder-first-pipeline-num-layers": ("num_layers_in_first_pipeline_stage", int, "N"),
    "--decoder-last-pipeline-num-layers": ("num_layers_in_last_pipeline_stage", int, "N"),
    "--microbatch-group-size-per-vp-stage": ("microbatch_group_size_per_virtual_pipeline_stage", int, "N"),
    "--mscale": ("yarn_mscale", float, "X"),
    "--mscale-all-dim": ("yarn_mscale_all_dim", float, "X"),
    "--rotary-scaling-factor": ("rope_scaling_factor", float, "X"),
    "--rope-type": ("rope_scaling_type", lambda text: {"rope": "none"}.get(text, text), "{rope,yarn}"),
    "--distributed-timeout-minutes": ("distributed_timeout_seconds", lambda text: 60.0 * float(text), "X"),
    "--check-weight-hash-across-dp-replicas-interval": ("check_replicas_interval", int, "N"),
}

# A field whose default is True is switched off by `--no-<field>`, except where Megatron has a name for it.
SWITCHED_OFF_BY = {"add_bias_linear": "--disable-bias-linear", "muon_split_qkv": "--muon-no-split-qkv"}

# Values of Megatron's that have another name here.
VALUES = {
    "attention_backend": {"fused": "sdpa", "unfused": "reference"},
    "cp_comm_type": {"all_gather": "allgather"},
}

# flag -> (values it may have; () for a switch, None for any; why it changes nothing)
ALREADY: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "--use-mcore-models": ((), "there is one set of models"),
    "--use-flash-attn": ((), "GPU and mask decide (layers/attention/choice); --attention-backend flash insists"),
    "--no-masked-softmax-fusion": ((), "the softmax is not fused"),
    "--no-bias-swiglu-fusion": ((), "bias and activation are not fused"),
    "--no-bias-dropout-fusion": ((), "bias and dropout are not fused"),
    "--no-rope-fusion": ((), "RoPE is not fused"),
    "--no-gradient-accumulation-fusion": ((), "dW and its accumulation are not fused"),
    "--no-gradient-reduce-div-fusion": ((), "gradients are divided after the reduction"),
    "--no-persist-layer-norm": ((), "norms are torch's"),
    "--attention-softmax-in-fp32": ((), "softmax statistics are in fp32"),
    "--calculate-per-token-loss": ((), "gradients are divided once, by the global token count"),
    "--no-create-attention-mask-in-dataloader": ((), "masks are made in the model"),
    "--dataloader-type": (("single",), "samples come in the dataset's order"),
    "--num-workers": (None, "samples are read in the training process; their order does not depend on it"),
    "--use-cpu-initialization": ((), "weights are drawn on the CPU, so that they are the same on every machine"),
    "--init-model-with-meta-device": ((), "models are built on the meta device"),
    "--log-throughput": ((), "every line has it"),
    "--log-loss-scale-to-tensorboard": ((), "TensorBoard gets it"),
    "--log-validation-ppl-to-tensorboard": ((), "TensorBoard gets it"),
    "--overlap-p2p-communication-warmup-flush": ((), "messages between stages always overlap"),
    "--exit-signal-handler": ((), "SIGTERM ends every run after the step it is in"),
    "--use-dist-ckpt": ((), "every checkpoint is one that any layout loads"),
    "--auto-detect-ckpt-format": ((), "there is one format"),
    "--te-rng-tracker": ((), "random numbers are minimegatron's own, also in Transformer Engine's layers"),
    "--inference-rng-tracker": ((), "training draws the same numbers with it"),
    "--manual-gc": ((), "Python collects its garbage as usual; only the time of a step could differ"),
    "--manual-gc-interval": (None, "Python collects its garbage as usual; only the time of a step could differ"),
    "--empty-unused-memory-level": (("0",), "the allocator keeps its memory"),
    "--flight-recorder-dump-on-timeout": ((), "a rank that runs out of time dumps what it remembers"),
    "--flight-recorder-include-stack-trace": ((), "dumps have stacks"),
    "--is-hybrid-model": ((), "--hybrid-override-pattern says so"),
    "--experimental-attention-variant": (("gated_delta_net",), "--linear-attention-freq says where"),
    "--local-rank": (None, "torchrun says it in the environment"),
}

# Flags that minimegatron does not have yet, as patterns without the dashes.
UNSUPPORTED = """
    load-main-params-from-ckpt load-model-opt-format *-persistent-* async-strategy async-ckpt-* dist-ckpt-* ckpt-*
    pretrained-checkpoint use-mp-args-* *-tokenizer-model-from-checkpoint-args override-ckpt-iteration most-recent-k
    replication* strict-fsdp-* moe-* enable-gpt-oss cache-mla-latents mla-* yarn-* no-yarn-*
    rotary-seq-len-interpolation-factor no-rope-freq mtp-* mamba-* hybrid-* linear-attention-*
    linear-conv-* encoder-seq-length encoder-*-parallel-size bert-* short-seq-prob vocab-extra-ids img-*
    patch-dim num-channels num-classes vision-* dino-* swin-* freeze-LM freeze-ViT disable-vision-* classes-*
    retro-* ict-* biencoder-* indexer-* embedding-path evidence-data-path titles-data-path retriever-*
    *-in-block-prob overlap-param-gather-* no-align-param-gather no-use-layer-wise-* *-megatron-fsdp *-custom-fsdp
    fsdp-* torch-fsdp2-* suggested-* outer-dp-* *hsdp* lion-* head-lr-mult no-weight-decay-cond*
    no-overlap-p2p-communication grad-reduce-in-bf16 ddp-* tp-comm-* fp8-* fp4-* keep-fp8-* reuse-grad-buf-* te-*
    kitchen-* use-te use-transformer-engine-op-fuser cuda-graph-* external-cuda-graph optimizer-cuda-graph
    cpu-offloading* fine-grained-* offload-modules activation-offload-fraction delay-offload-*
    apply-residual-connection-post-layernorm apply-query-key-layer-scaling heterogeneous-layers-*
    init-method-xavier-uniform data-parallel-random-init
    embedding-init-method-std per-split-data-args-path per-dataset-sequences-path fim-* sft sft-* tiktoken-*
    special-tokens tokenizer-metadata tokenizer-hf-* tokenizer-sentencepiece-* trust-remote-code null-tokenizer-*
    chat-template metadata-path no-mmap-bin-files num-dataset-builder-threads dataloader-* full-validation
    multiple-validation-sets mid-level-dataset-surplus object-storage-cache-path padded-vocab-size
    step-batch-size-schedule eval-global-batch-size eval-micro-batch-size start-eval-at-iter skip-train
    iterations-to-skip lr-wsd-decay-samples batch-size pytorch-profiler-* use-nsys-profiler nvtx-ranges
    record-shapes log-timers-* straggler-ctrlr-port disable-straggler-* timing-log-*
    log-progress log-world-size-* log-energy log-l2-* log-max-* log-runtime-* log-device-* tensorboard-log-interval
    tensorboard-queue-size one-logger-* no-one-logger enable-one-logger logging-level app-tag-* otel-*
    throughput-window-size inprocess-* ft-* enable-ft-package calc-ft-timeouts error-injection-*
    adlr-autoresume* check-for-spiky-loss check-for-large-grads gpu-sniff-* no-manual-gc-* deterministic-mode nccl-*
    use-nccl-ub use-sharp sharp-* high-priority-stream-groups use-gloo-process-groups disable-gloo-process-groups
    disable-symmetric-registration flight-recorder-include-only-active
    flight-recorder-extra-* use-tp-pp-dp-mapping lazy-mpu-init inference-*
    max-tokens-to-oom num-speculative-tokens enable-chunked-prefill return-log-probs *-cuda-graphs rl-* grpo-*
    perform-rl-step langrl-* refit-method logits-* export-* modelopt-* yaml-cfg use-legacy-models
    model-parallel-size warmup checkpoint-activations
"""


def is_unsupported(flag: str) -> bool:
    """Whether Megatron has a flag that minimegatron does not have; False for one that is unknown to both."""
    return any(fnmatchcase(flag.removeprefix("--"), pattern) for pattern in UNSUPPORTED.split())
