"""Model FLOPs of a training step, and MFU, the share of the machine's peak that they are.

The problem in a sentence: "tokens per second" cannot be compared between models; "share of the peak" can, if all
authors count alike.

**Model FLOPs**: the multiplications and additions of the matrix products in the model's formula: two for each
multiply-add, three times the forward pass (the backward pass has a product for dx and one for dW). Not counted: norms,
softmax, activations, the optimizer, and whatever is computed a second time (recompute) or in vain (the masked half of
causal attention, padding of experts).

They are counted by running: one layer of each kind runs forward without memory (`kinds.forward_products`), as the
model defines it, in one process. The first call of a process takes about a second, most of it imports of torch; the
result is cached. For one token in a sequence of s that gives

    attention  QKV            2 h (a + 2 g) d          gated MLP   3 * 2 h f
               scores, values 2 * 2 a d * s/2          plain MLP   2 * 2 h f
               output         2 a d h                  logits      2 h V'
    experts    k * (gated or plain MLP of the expert's f) + shared MLP + router 2 h E, in the layers that have them

`s/2`: query i sees i keys, half of s on average (Megatron's convention; papers before 2023 count the full square, see
`causal=False`, which for a plain GPT is the closed form 72 B L s h^2 (1 + s/(6h) + V/(12hL)) of arXiv 2104.04473).

**MFU** = model FLOPs / (seconds * GPUs * peak), against the *dense bf16* peak that the vendor states. MFU can only be
compared between authors with the same convention; the log line has this one.

Megatron-LM: `num_floating_point_operations` in `megatron/training/training.py`.
"""

from __future__ import annotations

import re

from minimegatron.config import TransformerConfig
from minimegatron.config.fields import MODEL
from minimegatron.footprint.kinds import forward_products
from minimegatron.models.spec import ModuleSpec

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


def forward_flops(
    config: TransformerConfig, seq_length: int, causal: bool = True, spec: ModuleSpec | None = None
) -> dict[str, float]:
    """FLOPs of one sequence's forward pass by part of the model: `attention` (or another mixer), `mlp` (everything else
    in a layer), `logits`.

    Args:
        config: the model; recompute and precision do not matter.
        causal: count the half of attention's square that is visible; else all of it.
        spec: the spec of a layer; default the model's.
    """
    names = TransformerConfig.names_of(MODEL) | {"make_vocab_size_divisible_by", "decoder_seq_length"}
    model = TransformerConfig(**{name: getattr(config, name) for name in names})
    found = {"attention": 0.0, "mlp": 0.0, "logits": 0.0}
    for count, window, flops in forward_products(model, seq_length, causal, spec):
        outside = window in ("", "output_layer")
        found["attention" if "attention" in window else "logits" if outside else "mlp"] += count * flops
    return found


def step_flops(
    config: TransformerConfig,
    batch_size: int,
    seq_length: int,
    causal: bool = True,
    spec: ModuleSpec | None = None,
) -> float:
    """Model FLOPs of one training step (forward and backward) over `batch_size` sequences, all GPUs together."""
    return 3.0 * batch_size * sum(forward_flops(config, seq_length, causal, spec).values())
