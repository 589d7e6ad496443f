"""How much arithmetic a training step is, and what share of the machine that was.

The problem in a sentence: "tokens per second" cannot be compared between models; "share of the peak" can, if all
authors count alike.

**Model FLOPs**: the multiplications and additions of the matrix products that the *maths* needs, twice one for each
multiply-add, three times the forward pass (the backward pass multiplies once for dx and once for dW). Not counted:
norms, softmax, activations, the optimizer, and whatever is computed a second time (recompute) or for nothing (the
masked half of causal attention). For one token in a sequence of s:

    attention  QKV            2 h (a + 2 g) d          gated MLP   3 * 2 h f
               scores, values 2 * 2 a d * s/2          plain MLP   2 * 2 h f
               output         2 a d h                  logits      2 h V'
    experts        k * (gated or plain MLP of the expert's f) + shared MLP + router 2 h E, in the layers that have them

`s/2`: query i sees i keys, half of s on average (Megatron's convention; papers before 2023 count the full square, see
`causal=False`, which for a plain GPT is the closed form 72 B L s h^2 (1 + s/(6h) + V/(12hL)) of arXiv 2104.04473).

**MFU** = model FLOPs / (seconds * GPUs * peak), against the *dense bf16* peak that the vendor states. A number without
its convention says nothing; the log line's convention is this one.

Megatron-LM: `num_floating_point_operations` in `megatron/training/training.py`.
"""

from __future__ import annotations

import re

from minimegatron.config import TransformerConfig

# Dense bf16 peaks in TFLOP/s from the vendors' data sheets (the sheets' "with sparsity" figures are twice these). The
# first name that torch's device name has as whole words decides, so the longer names stand first.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200", 989.5),
    ("GH200", 989.5),
    ("H100", 989.5),
    ("H800", 989.5),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, in TFLOP/s; None when it is not in the table.

    An A1000 is no A100, and a variant of a card (Ti, D, Laptop) is another card.
    """
    for name, peak in PEAK_TFLOPS:
        if re.search(rf"\b{name}\b(?! (?:Ti|D|Laptop)\b)", device_name):
            return peak
    return None


def attention_pairs(seq_length: int, sliding_window: int | None = None, causal: bool = True) -> float:
    """(query, key) pairs of one sequence that are multiplied: s^2, half of it when causal, fewer with a window."""
    if not causal:
        return float(seq_length**2)
    w = min(sliding_window or seq_length, seq_length)
    return w * seq_length - w * w / 2


def forward_flops(config: TransformerConfig, seq_length: int, causal: bool = True) -> dict[str, float]:
    """FLOPs of one sequence's forward pass by part of the model: `attention`, `mlp`, `logits`."""
    h, d = config.hidden_size, config.kv_channels
    a, g = config.num_attention_heads, config.num_query_groups
    depths = config.mtp_num_layers or 0  # each a layer like the last, a projection of 2 h and logits
    layers = config.num_layers + depths
    windows = [config.window_of(number) for number in range(layers)]
    pairs = sum(attention_pairs(seq_length, window, causal) for window in windows)  # of all layers
    if config.multi_latent_attention:
        r, turned, v = config.kv_lora_rank, config.qk_pos_emb_head_dim, config.v_head_dim
        queries = h * a * d if config.q_lora_rank is None else config.q_lora_rank * (h + a * d)
        weights = queries + h * (r + turned) + r * a * (config.qk_head_dim + v) + a * v * h
        core = 2 * a * (d + v) * pairs
    else:
        weights = h * d * ((a + 2 * g) + a)
        core = 2 * 2 * a * d * pairs
    matrices = 3 if config.gated_linear_unit else 2
    with_experts = sum(config.expert_layers) + depths * config.has_experts(config.num_layers)
    width = (layers - with_experts) * config.ffn_hidden_size  # of all MLPs that a token passes
    width += with_experts * (
        config.moe_router_topk * config.moe_ffn_hidden_size + (config.moe_shared_expert_intermediate_size or 0)
    )
    routers = with_experts * 2 * seq_length * h * (config.num_experts or 0)
    return {
        "attention": float(layers * 2 * seq_length * weights + core),
        "mlp": float(2 * seq_length * h * width * matrices + routers + depths * 2 * seq_length * 2 * h * h),
        "logits": float((1 + depths) * 2 * seq_length * h * config.padded_vocab_size(1)),
    }


def step_flops(config: TransformerConfig, batch_size: int, seq_length: int, causal: bool = True) -> float:
    """Model FLOPs of one training step (forward and backward) over `batch_size` sequences, all GPUs together."""
    return 3.0 * batch_size * sum(forward_flops(config, seq_length, causal).values())
