"""Bytes of norms, linear layers, the MLP, embedding and loss.

n tokens on this rank (n/t in the norms with sequence parallelism), e bytes an element, t ranks of tp:

| step       | keeps                                                           | bytes                             |
|------------|-----------------------------------------------------------------|-----------------------------------|
| norm       | LayerNorm: x; RMSNorm: x and the normed x in fp32; statistics   | e n h; 8 n h                      |
| linear     | its input; in FP8 with one scale a tensor that in 8 bits        | e n i; n i                        |
| activation | gated: gate and up, act(gate); plain: its input                 | e n 3f/t; e n f/t                 |
| loss       | an fp32 softmax                                                 | 4 n V/t                           |

The published closed form of a layer, s b h (10 + 24/t + 5 a s / (h t)) with 16-bit GELU and dropout masks of one byte,
is the same list for Megatron's kernels of 2022 (Korthikanti et al. 2022, arXiv 2205.05198); this one is that of the
operations that torch runs here with `kernels = torch`. Megatron-LM: `megatron/training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from minimegatron.footprint.tape import Sizes, Step, Tape, formula, require_known, tape_of
from minimegatron.layers.dropout import Dropout
from minimegatron.layers.embedding import LanguageModelEmbedding
from minimegatron.layers.fp8_linear import ParallelFp8
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.mla import ReplicatedLinear
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm


@formula(Norm)
def norm(module: Norm, z: Sizes) -> Tape:
    """Over as many rows as the stream has."""
    return Tape([norm_of(module, z, z.n_cut)])


def norm_of(module: Norm, z: Sizes, rows: int, name: str = "norm") -> Step:
    """Of `rows` rows."""
    x = z.e * rows * module.weight.shape[0]
    if module.kind == "LayerNorm" or z.norms_keep_input:
        return Step(name, x + (8 if module.kind == "LayerNorm" else 4) * rows, x, 2 * x)
    wide = x // z.e * 4
    return Step(name, 2 * wide + 4 * rows, 2 * wide, 4 * wide)  # five; the normed x is gone by then


def kept_of_input(module: Norm, x: int, z: Sizes) -> int:
    """What a norm keeps of its input x itself: torch's RMSNorm in 16 bits keeps an fp32 copy instead."""
    return 0 if module.kind == "RMSNorm" and z.e < 4 and not z.norms_keep_input else x


@formula(Dropout)
def dropout(module: Dropout, z: Sizes) -> Tape:
    """Of the stream: its mask, which torch keeps as wide as x on a CPU."""
    mask = z.stream if z.device == "cpu" else z.stream // z.e
    return Tape([Step("dropout", mask, 0, 2 * z.stream)] * (module.p > 0))


def column(name: str, layer: ColumnParallelLinear, z: Sizes) -> Step:
    """x A^T with A cut by its outputs: x is gathered with sequence parallelism, forward and backward."""
    rows, i = layer.weight.shape
    x, whole = z.e * (z.n_cut if layer.sequence_parallel else z.n) * i, z.e * z.n * i
    out = z.e * z.n * rows * (layer.tp.size if layer.gather_output else 1)
    gathered = whole if layer.sequence_parallel else 0
    own = 0 if z.adds_products else z.e * rows * i
    step = Step(name, x, gathered + out, out + whole + gathered + own, z.e * z.n * rows + x)
    return _in_fp8(step, layer, z, x)


def row(name: str, layer: RowParallelLinear, z: Sizes, keeps_input: bool = True) -> Step:
    """x A^T with A cut by its inputs; the output is a sum over ranks.

    Args:
        keeps_input: of the step before it is not kept anyway.
    """
    h, part = layer.weight.shape[0], z.e * z.n * layer.weight.shape[1]
    x, whole = z.e * z.n_cut * h, z.e * z.n * h
    own = 0 if z.adds_products else z.e * layer.weight.numel()
    back = part + (whole if layer.sequence_parallel else x) + own
    step = Step(name, part if keeps_input else 0, 2 * whole if layer.tp.size > 1 else whole, back, whole + part)
    return _in_fp8(step, layer, z, part)


def replicated(name: str, layer: ReplicatedLinear, z: Sizes, keeps_input: bool = True) -> Step:
    """x A^T on the tokens that are here; the gradient of A exists before it is added up."""
    o, i = layer.weight.shape
    x, out = z.e * z.n_cut * i, z.e * z.n_cut * o
    return _in_fp8(Step(name, x if keeps_input else 0, out, out + x + z.e * o * i), layer, z, x)


def _in_fp8(step: Step, layer: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear, z: Sizes, x: int) -> Step:
    """The step as FP8 computes it, of x bytes of input; without FP8 as it is."""
    if layer.fp8 is None:
        return step
    o, i = layer.weight.shape
    return fp8_step(step, layer.fp8, z, rows=(x // z.e // i, z.n), o=o, i=i)


def fp8_step(step: Step, fp8: ParallelFp8, z: Sizes, rows: tuple[int, int], o: int, i: int) -> Step:
    """One scale a tensor: its input in 8 bits is kept; tiles: its input. On a CPU factors are made fp32 for a product.

    Args:
        rows: of the input that is kept, and of the products.
        o, i: of the matrix on this rank.
    """
    n, e = rows[1], z.e
    keeps = rows[0] * i * (1 if fp8.wgrad and not fp8.tiled else e)
    require_known(not fp8.tiled, "FP8 with a scale for every tile")

    def product(a: int, b: int, out: int) -> int:
        return 4 * max(a + 2 * b, a + b + out) if z.device == "cpu" else e * out

    cast = 8 if z.device == "cpu" else 1
    forward = max(n * i + product(n * i, o * i, n * o), cast * n * i)
    dx, dw = product(n * o, o * i, n * i), e * n * i + product(n * o, n * i, o * i)
    return Step(step.name, keeps, forward, e * n * o + max(n * o + max(dx, dw), cast * n * o), step.puts_off)


def copies_in_fp8(model: nn.Module, z: Sizes) -> int:
    """Bytes of weights in FP8, which last as long as a step; a GPU's cast writes the transpose too."""
    found = [m for m in model.modules() if getattr(m, "fp8", None) is not None]
    count = sum(p.numel() for m in found for name, p in m.named_parameters(recurse=False) if name.startswith("weight"))
    return count * (1 if z.device == "cpu" else 2)


@formula(MLP)
def mlp(module: MLP, z: Sizes) -> Tape:
    require_known(type(module.linear_fc1) is ColumnParallelLinear, type(module.linear_fc1).__name__)
    f = module.linear_fc2.weight.shape[1]
    between = activation(module.kind, z.e * z.n * f, z)
    return Tape([column("fc1", module.linear_fc1, z), between, row("fc2", module.linear_fc2, z)])


def activation(kind: str, x: int, z: Sizes) -> Step:
    """Of x bytes for each half."""
    if kind in ("swiglu", "geglu", "geglu_tanh"):
        return Step("activation", (2 if kind == "swiglu" and z.own_kernels else 3) * x, 0, 3 * x)
    if kind == "relu":
        return Step("activation", 0, x, 2 * x)  # it keeps its output, which fc2 keeps too
    if kind == "squared_relu":
        return Step("activation", x, x, 4 * x)
    return Step("activation", x, 0, 2 * x)


@formula(LanguageModelEmbedding)
def embedding(module: LanguageModelEmbedding, z: Sizes) -> Tape:
    """The look-up itself keeps nothing; the gradient of the table exists before it is added up."""
    require_known(not module.config.scale_embeddings, "scaled embeddings")
    x, whole = z.stream, z.e * z.n * module.config.hidden_size
    table, learned = z.e * sum(p.numel() for p in module.parameters()), module.position_embeddings is not None
    drop = tape_of(module.dropout, z).kept
    return Tape([Step("embedding", drop, 3 * whole if z.t > 1 else (1 + learned) * x, table + x)])


def loss(weight: torch.Tensor, z: Sizes) -> Tape:
    """The output layer and the loss of its logits; a tied layer's weight is the table's."""
    columns, h = weight.shape
    x, whole, logits = z.e * z.n_cut * h, z.e * z.n * h, z.e * z.n * columns
    gathered = whole if z.mesh.sequence_parallel else 0
    own = 0 if z.adds_products else z.e * columns * h
    last = Step("loss", 4 * z.n * columns + 13 * z.n, logits, logits if z.e < 4 else 0)
    if z.own_kernels:  # which keep the logits
        last = Step("loss", logits + 12 * z.n, 0, logits)
    return Tape([Step("output", x, gathered + logits, logits + whole + gathered + own, logits + x), last])
