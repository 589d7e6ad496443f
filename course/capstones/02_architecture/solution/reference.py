"""The mixer on one sequence, a token after the other."""

from __future__ import annotations

import math

import torch


def reference(config, layer, weights, x):
    """x [s, h] -> [s, h]."""
    heads, d = config.num_attention_heads, config.kv_channels
    packed = x @ weights["input.weight"].T + weights["input.bias"]
    memory, rows = torch.zeros(heads, d, d, dtype=x.dtype), []
    for token in packed.view(len(x), heads, 3 * d + 1):
        q, k, v, gate = token[:, :d], token[:, d : 2 * d], token[:, 2 * d : 3 * d], token[:, 3 * d]
        memory = torch.sigmoid(gate + 3)[:, None, None] * memory + k[:, :, None] * v[:, None, :]
        y = (q[:, :, None] * memory).sum(1) / math.sqrt(d)
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + config.layernorm_epsilon)
        rows.append((y * weights["norm"][:, None]).flatten())
    return torch.stack(rows) @ weights["output.weight"].T + weights["output.bias"]
