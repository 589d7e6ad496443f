"""Bytes of attention: what comes to its core, and what each way of computing the core keeps.

a heads and g groups of d channels on this rank, n tokens, e bytes an element:

| step                | keeps                                                             | bytes                     |
|---------------------|-------------------------------------------------------------------|---------------------------|
| qkv                 | its input                                                         | e n h                     |
| norms of q and k    | as any norm, of n a and n g rows                                  |                           |
| attention           | q and k after RoPE, the packed qkv, the output, log-sum-exp       | e n (2 a + g + a + 2 g) d |
| `reference`         | q, k and v of every head, output, weights                         | + 4 s/head, not n d       |
| documents, window   | on a CPU a table of who sees whom, in every layer                 | e b s^2, e s^2            |
| ring                | q, its own k and v, the output, log-sum-exp                       | e n (2 a + 2 g) d         |
| all-gather          | the same, and the output once more (`_ring`)                      | e n (3 a + 2 g) d         |
| all-to-all          | q, k and v of other heads, the output twice, log-sum-exp          | e n (3 a + 2 g) d         |
| latent              | the latents and their norms; q, k and [k; v] of all heads         |                           |

torch's CPU attention has a blockwise program for equal widths of keys and values, without dropout; otherwise it keeps
all weights, as `reference` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from minimegatron.footprint.dense import column, kept_of_input, norm_of, replicated, row
from minimegatron.footprint.tape import Sizes, Step, Tape, formula, require_known
from minimegatron.layers.attention import SelfAttention
from minimegatron.layers.core_attention import CoreAttention
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.mla import MultiLatentAttention
from minimegatron.layers.norm import HeadsNorm, Norm


@dataclasses.dataclass(frozen=True)
class Heads:
    """What comes to the core of attention on this rank.

    Attributes:
        a, g: query heads, key/value heads.
        d, d_v: channels of a query or key, of a value.
        made: bytes of q and k where they are tensors of their own; 0: they are views, as v is.
        angles: bytes that RoPE keeps.
        packed: bytes of the tensor that v is a view of, and q and k with it where they are not made.
    """

    a: int
    g: int
    d: int
    d_v: int
    made: int
    angles: int
    packed: int

    def q(self, z: Sizes) -> int:
        """Bytes of the queries."""
        return z.e * z.n * self.a * self.d

    def kv(self, z: Sizes) -> int:
        """Bytes of keys and values."""
        return z.e * z.n * self.g * (self.d + self.d_v)

    def out(self, z: Sizes) -> int:
        """Bytes of the output."""
        return z.e * z.n * self.a * self.d_v


@formula(SelfAttention)
def self_attention(module: SelfAttention, z: Sizes) -> Tape:
    config, linear = module.config, module.linear_qkv
    for part, kind in ((linear, ColumnParallelLinear), (module.core_attention, CoreAttention)):
        require_known(type(part) is kind, type(part).__name__)
    a, g, d = config.num_attention_heads // z.t, max(1, config.num_query_groups // z.t), config.kv_channels
    packed = z.e * z.n * linear.weight.shape[0] * (z.t if module.split_group else 1)
    q, k, norms = z.e * z.n * a * d, z.e * z.n * g * d, list[Step]()
    of_queries, of_keys = module.q_layernorm, module.k_layernorm
    require_known(not isinstance(of_queries, HeadsNorm), "a norm over all heads")
    if isinstance(of_queries, Norm) and isinstance(of_keys, Norm):
        of_q, of_k = norm_of(of_queries, z, z.n * a), norm_of(of_keys, z, z.n * g)
        of_k = dataclasses.replace(of_k, keeps=of_k.keeps - kept_of_input(of_keys, k, z))  # it is packed
        norms = [Step("norms of q and k", of_q.keeps + of_k.keeps, q + k, of_q.backward + of_k.backward + packed)]
    made = q + k if config.rotates or norms else 0
    heads = Heads(a, g, d, d, made, _angles(z), packed)
    core = core_attention(heads, z)
    if config.recomputes("core_attn"):
        core = Tape([core]).recomputed("attention", made + heads.angles + packed)
        core = dataclasses.replace(core, keeps=core.keeps + q)  # the projection's input
    return Tape([column("qkv", linear, z), *norms, core, row("proj", module.linear_proj, z, False)])


@formula(MultiLatentAttention)
def latent_attention(module: MultiLatentAttention, z: Sizes) -> Tape:
    config, a, e = module.config, module.config.num_attention_heads // z.t, z.e
    for part, kind in ((module.linear_kv_up_proj, ColumnParallelLinear), (module.core_attention, CoreAttention)):
        require_known(type(part) is kind, type(part).__name__)
    if config.q_lora_rank is None:
        queries = [column("q", module.linear_q_proj, z)]
    else:
        queries = [
            replicated("q down", module.linear_q_down_proj, z),
            norm_of(module.q_layernorm, z, z.n_cut, "q norm"),
            column("q up", module.linear_q_up_proj, z),
        ]
    both = kept_of_input(module.kv_layernorm, e * z.n_cut * module.d_r, z)  # the norm's input is a view of both
    latent = norm_of(module.kv_layernorm, z, z.n_cut, "kv norm")
    d, up = module.d_n + module.d_r, e * z.n * a * (module.d_n + module.d_v)
    heads = Heads(a, a, d, module.d_v, 2 * e * z.n * a * d, _angles(z), up)
    core = core_attention(heads, z)
    if config.recomputes("core_attn"):
        core = Tape([core]).recomputed("attention", heads.made + heads.angles + up)
        core = dataclasses.replace(core, keeps=core.keeps + heads.out(z))  # the projection's input
    keys = [
        replicated("kv down", module.linear_kv_down_proj, z, keeps_input=False),
        dataclasses.replace(latent, keeps=latent.keeps + both),
        column("kv up", module.linear_kv_up_proj, z),
    ]
    return Tape([*queries, *keys, core, row("proj", module.linear_proj, z, False)])


def _angles(z: Sizes) -> int:
    """What RoPE keeps of a layer: in 16 bits torch's the rounded angles."""
    rounds = z.config.rotates and z.e < 4 and not z.own_kernels
    return 2 * z.e * z.n * z.config.rotary_channels if rounds else 0


# -------------------------------------------------------------------------------------------------------- the core


def core_attention(heads: Heads, z: Sizes) -> Step:
    """From q, k and v to the heads' outputs."""
    config, backend = z.config, z.config.attention_backend
    backend = "sdpa" if backend == "auto" else backend
    require_known(backend in CORES, f"attention_backend {backend}")
    require_known(config.attn_logit_softcapping is None, "capped attention scores")
    require_known(config.window_attn_skip_freq is None, "layers with different windows")
    drops = config.attention_dropout > 0 and z.device == "cpu"  # a GPU's programs drop again from the same seed
    require_known(
        not drops or (z.mesh.cp.size == 1 and backend == "sdpa"), f"dropout of attention weights by {backend}"
    )
    inner, outer = z.mesh.cp_inner.size, z.mesh.cp_outer.size
    require_known(inner == 1 or outer == 1, "cp_comm_type a2a+p2p")
    if outer > 1:
        return _ring(heads, z, z.mesh.parallel.cp_comm_type == "allgather")
    if inner > 1:
        return _all_to_all(CORES[backend], heads, z, inner)
    if backend == "sdpa" and z.device == "cpu" and (heads.d != heads.d_v or drops):
        return _weights(heads, z)
    return CORES[backend](heads, z)


def table(z: Sizes, element: int = 1) -> int:
    """Bytes of who sees whom, 0 where causal says it."""
    window, s = z.config.sliding_window, z.s * z.mesh.cp_inner.size
    if z.device == "cuda" or not z.documents and (window is None or window >= s):
        return 0  # a GPU's programs are told where documents and windows begin
    return element * s * s * (z.b if z.documents else 1)


def _sdpa(heads: Heads, z: Sizes) -> Step:
    keeps = heads.made + heads.angles + heads.packed + heads.out(z) + 4 * z.n * heads.a + table(z, z.e)
    return Step("attention", keeps, 0, 2 * heads.q(z) + heads.packed)


def _local(heads: Heads, z: Sizes) -> Step:
    require_known(not table(z), "attention_backend local with a table of who sees whom")
    step, copy = _sdpa(heads, z), heads.out(z)  # heads side by side again
    return dataclasses.replace(step, keeps=step.keeps + copy, forward=copy)


def _reference(heads: Heads, z: Sizes) -> Step:
    q, scores = heads.q(z), 4 * z.b * heads.a * z.s * z.s
    half = scores // 4 * z.e if z.e < 4 else 0  # weights in the model's dtype
    mine = heads.made and q
    keeps = (mine + heads.angles or heads.packed) + 2 * q + scores + half + (table(z) or z.s * z.s) + q
    return Step("attention", keeps, 2 * scores, 2 * scores + half + 2 * q)


def _weights(heads: Heads, z: Sizes) -> Step:
    """torch's formula as it stands: q and k times the root of the scale, and all weights."""
    qk, weights = 4 * z.n * heads.a * 2 * heads.d, 4 * z.b * heads.a * z.s * z.s  # in fp32
    v = heads.packed if z.e == 4 and heads.a == heads.g else 4 * z.n * heads.a * heads.d_v
    dropped = 2 * weights if z.config.attention_dropout else 0  # the mask, and what it has left
    keeps = qk + heads.angles + v + weights + dropped + heads.out(z)
    return Step("attention", keeps, 2 * weights, 2 * weights + v + qk)


CORES: dict[str, Callable[[Heads, Sizes], Step]] = {
    "sdpa": _sdpa,
    "flash": _sdpa,
    "local": _local,
    "reference": _reference,
}


def _ring(heads: Heads, z: Sizes, gathers: bool) -> Step:
    """Blocks of k and v come by, or all at once; gradients are added up in fp32.

    Where one piece covers all queries first (a rank's own block; of gathered keys those of the last rank, whose tokens
    are neighbours), the output is that piece, which lies as the projection wants it. Else it is copied once more.
    Values narrower than keys are as wide here, in zeros, and the output is copied without them.
    """
    q, kv, outer = heads.q(z), 2 * z.e * z.n * heads.g * heads.d, z.mesh.cp_outer
    plain = not z.documents and z.config.sliding_window is None and z.config.attention_backend in ("auto", "sdpa")
    as_wanted = plain and heads.d == heads.d_v and (not gathers or outer.rank == outer.size - 1)
    out = q + heads.out(z) * (not as_wanted)
    keeps = (heads.made and q + heads.angles or heads.packed) + kv + out + 4 * z.n * heads.a
    blocks = z.mesh.cp_outer.size if gathers else 1
    wide = 4 // z.e
    back = 2 * wide * q + q + 3 * blocks * wide * kv + blocks * kv
    if outer.size > 2 and not gathers:  # the next block arrives, and the gradient that follows the last one
        back += kv + 2 * wide * kv
    return Step("attention", keeps, wide * q + 2 * blocks * kv, back)


def _all_to_all(core: Callable[[Heads, Sizes], Step], heads: Heads, z: Sizes, ranks: int) -> Step:
    """Each rank has all tokens of some heads; with fewer groups than ranks the groups are copied."""
    g = heads.g
    while g % ranks:
        g += heads.g
    arrived = z.e * z.n * (heads.a + 2 * g) * heads.d
    whole = dataclasses.replace(z, s=z.s * ranks)
    some = Heads(heads.a // ranks, g // ranks, heads.d, heads.d, 0, 0, arrived)  # narrower values are filled up
    step = core(some, whole)
    return dataclasses.replace(
        step,
        keeps=step.keeps + heads.angles + heads.out(z),
        forward=step.forward + arrived,
        backward=step.backward + arrived,
    )
