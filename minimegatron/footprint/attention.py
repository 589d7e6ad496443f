"""Bytes of attention.

a heads and g groups of d channels on this rank:

| step                   | keeps                                                          | bytes                       |
|------------------------|----------------------------------------------------------------|-----------------------------|
| qkv                    | its input                                                      | e n h                       |
| attention              | q and k after RoPE, the packed qkv, the output, log-sum-exp    | e n (2 qd + kd + qd + 2 kd) |
|                        | `reference`: q, k and v of every head, output, weights         | + 4 s/head, not n d         |
"""

from __future__ import annotations

import dataclasses

from minimegatron.footprint.dense import column, kept_of_input, norm_of, row, torch_computes
from minimegatron.footprint.tape import Sizes, Step, Tape, formula, require_known
from minimegatron.layers.attention import SelfAttention
from minimegatron.layers.core_attention import CoreAttention


@dataclasses.dataclass(frozen=True)
class Heads:
    """What comes to the core of attention on this rank.

    Attributes:
        a, g: query heads, key/value heads.
        d, d_v: channels of a query or key, of a value.
        before: bytes that the gradients of q, k and v take together where they came from.
        roped: bytes of q and k after RoPE, and of its angles.
        packed: bytes of what q, k and v without RoPE are views of.
    """

    a: int
    g: int
    d: int
    d_v: int
    before: int
    roped: int
    packed: int


@formula(SelfAttention)
def self_attention(module: SelfAttention, z: Sizes) -> Tape:
    config, g = module.config, max(1, module.config.num_query_groups // z.t)
    require_known(module.q_layernorm is None, "norms of queries and keys")
    torch_computes(config.kernels, z)
    a, d = config.num_attention_heads // z.t, config.kv_channels
    packed = z.e * z.n * module.linear_qkv.weight.shape[0] * (z.t if module.split_group else 1)
    roped = 0
    if config.rotates:  # and in 16 bits the rounded angles
        roped = z.e * z.n * d * (a + g) + (2 * z.e * z.n * config.rotary_channels if z.e < 4 else 0)
    heads = Heads(a, g, d, d, packed, roped, packed)
    core = core_attention(module.core_attention, heads, z)
    if config.recomputes("core_attn"):
        core = Tape([core]).recomputed("attention", roped + packed)
        core = dataclasses.replace(core, keeps=core.keeps + z.e * z.n * a * d)  # the projection's input
    return Tape([column("qkv", module.linear_qkv, z), core, row("proj", module.linear_proj, z, False)])


def core_attention(module: CoreAttention, heads: Heads, z: Sizes) -> Step:
    """From q, k and v to the heads' outputs."""
    config = module.config
    require_known(config.attention_dropout == 0, "dropout of attention weights")
    require_known(z.mesh.cp.size == 1, "context parallelism")
    q = z.e * z.n * heads.a * heads.d
    if config.attention_backend == "reference":
        scores = 4 * z.b * heads.a * z.s * z.s
        half = scores // 4 * z.e if z.e < 4 else 0  # weights in the model's dtype
        roped = heads.roped - z.e * z.n * heads.d * heads.g * config.rotates
        keeps = (roped or heads.packed) + 2 * q + scores + half + z.s * z.s + q
        return Step("attention", keeps, 2 * scores, 2 * scores + half + 2 * q)
    copy = q if config.attention_backend == "local" else 0  # heads side by side again
    keeps = heads.roped + heads.packed + q + copy + 4 * z.n * heads.a
    return Step("attention", keeps, copy, 2 * q + heads.before)
