"""What a forward pass keeps for the backward pass, operation by operation, in bytes: arithmetic, no tensor is made.

The problem in a sentence: whether a model fits is decided by its activations as much as by its weights, and one wants
to know before there is a machine to try it on.

A `Step` is an operation: what it keeps for its backward pass, and what else is alive while it runs forward and
backward. A `Tape` is a list of steps, forward from the first to the last and backward again. So the memory is highest
at one step, and that step has a name:

    forward     kept so far + what this step keeps + its workspace
    backward    kept up to and with this step      + its workspace

Recompute is a tape inside a step: the step keeps its input, and going back through it holds the whole tape again.

One layer, n tokens on this rank (n/t in the norms with sequence parallelism), e bytes an element, t ranks of tp:

| step       | keeps                                                                 | bytes                       |
|------------|-----------------------------------------------------------------------|-----------------------------|
| norm       | LayerNorm: x; RMSNorm: x and the normed x in fp32; statistics         | e n h; 8 n h                |
| qkv        | its input                                                             | e n h                       |
| attention  | q and k after RoPE, the packed qkv, the output, log-sum-exp           | e n (2 qd + kd + qd + 2 kd) |
|            | `reference`: q, k and v of every head, output, weights                | + 4 s/head, not n d         |
| fc1        | its input                                                             | e n h                       |
| activation | gated: gate and up, act(gate); plain: its input                       | e n 3f/t; e n f/t           |
| fc2        | its input                                                             | e n f/t                     |
| output     | its input; the loss keeps an fp32 softmax                             | e n h + 4 n V/t             |

The published closed form, s b h (10 + 24/t + 5 a s / (h t)) of a 16-bit GELU layer with dropout masks of one byte, is
the same list for Megatron's kernels of 2022 (Korthikanti et al. 2022, arXiv 2205.05198); this one is that of the
operations that torch runs here with `kernels = torch`. What it does not know is named by `unknown`.
Megatron-LM: `megatron/training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minimegatron.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of it.
        keeps: bytes for the backward pass.
        forward, backward: bytes that are alive besides while it runs.
    """

    name: str
    keeps: int = 0
    forward: int = 0
    backward: int = 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """The memory at one step.

    Attributes:
        kept: bytes kept for backward passes.
        workspace: bytes alive besides.
        where: `backward fc1`.
    """

    kept: int
    workspace: int
    where: str

    @property
    def total(self) -> int:
        return self.kept + self.workspace


class Tape(tuple[Step, ...]):
    """Steps in the order of the forward pass."""

    @property
    def kept(self) -> int:
        """Bytes that all of it keeps."""
        return sum(step.keeps for step in self)

    def highest(self, backward: bool) -> Moment:
        """The fullest moment on the way forward or back."""
        kept, found = 0, [Moment(0, 0, "")]
        for step in self:
            kept += step.keeps
            way = f"{'backward' if backward else 'forward'} {step.name}"
            found.append(Moment(kept, step.backward if backward else step.forward, way))
        return max(found, key=lambda moment: moment.total)

    def recomputed(self, name: str, keeps: int, shared: int | None = None) -> Step:
        """All of it as one step, which keeps `keeps` bytes of input and runs forward once more on the way back.

        `shared` of them (default: all) are what its own steps keep of that input.
        """
        again, back = self.highest(False), self.highest(True)
        fullest = max(again, back, key=lambda moment: moment.total)
        _, _, inside = fullest.where.partition(" ")
        return Step(f"{name} ({inside})", keeps, max(s.forward for s in self),
                    fullest.total - (keeps if shared is None else shared))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one microbatch on one rank, in elements and bytes.

    Attributes:
        s, b: tokens of a sample, samples.
        t: ranks of tp.
        sequence_parallel: norms, dropout and residuals hold n/t tokens.
        e: bytes of an element of activations and weights.
        separate: a weight's gradient exists by itself before it is added up, because the buffer has another dtype.
    """

    s: int
    b: int
    t: int
    sequence_parallel: bool
    e: int
    separate: bool

    @property
    def n(self) -> int:
        return self.s * self.b

    def stream(self, h: int) -> int:
        """Bytes of the residual stream."""
        return self.e * self.n * h // (self.t if self.sequence_parallel else 1)


def unknown(config: TransformerConfig, context_parallel: int = 1, device: str = "cpu") -> list[str]:
    """What of this model is not predicted here."""
    kernels = ("torch", "auto") if device == "cpu" else ("torch",)
    found = {
        "experts (how many rows one gets is in the data)": config.num_experts,
        "multi-latent attention": config.multi_latent_attention,
        "prediction of several tokens": config.mtp_num_layers,
        "FP8": config.fp8_format,
        "transformer_impl transformer_engine": config.transformer_impl != "local",
        "own kernels": config.kernels not in kernels,
        "context parallelism": context_parallel > 1,
        "dropout of attention weights": config.attention_dropout > 0,
        "norms of queries and keys": config.qk_layernorm,
        "an fp32 residual stream": config.fp32_residual_connection,
    }
    return [what for what, there in found.items() if there]


def embedding(config: TransformerConfig, z: Sizes) -> Tape:
    """Ids, angles of RoPE; the look-up itself keeps nothing."""
    h, x = config.hidden_size, z.stream(config.hidden_size)
    whole, table = z.e * z.n * h, z.e * config.padded_vocab_size(z.t) // z.t * h
    learned = config.position_embedding_type == "learned_absolute"
    table += z.e * config.max_position_embeddings * h if learned else 0
    drop = x if config.hidden_dropout else 0
    return Tape([Step("embedding", drop, 3 * whole if z.t > 1 else (1 + learned) * x, table + x)])


def batch(config: TransformerConfig, z: Sizes) -> Step:
    """What every stage has of a microbatch: ids, labels, mask, angles."""
    angles = 4 * z.n * config.rotary_channels if config.rotates and z.e == 4 else 0  # else layers keep them rounded
    return Step("batch", 20 * z.n + angles)


def layer(config: TransformerConfig, z: Sizes) -> Tape:
    """A transformer layer, recomputed where the configuration says so for single modules."""
    h, x = config.hidden_size, z.stream(config.hidden_size)
    norm, drop = _norm(config, z, "norm"), Step("dropout", x if config.hidden_dropout else 0, 0, 2 * x)
    if config.recomputes("layernorm"):
        norm = Tape([norm]).recomputed("norm", x, _of_input(config, z))
    a, g, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
    packed = z.e * z.n * d * (a + 2 * g if g < z.t else (a + 2 * g) // z.t)
    f, halves = config.ffn_hidden_size // z.t, 2 if config.gated_linear_unit else 1
    core = _attention(config, z, packed)
    if config.recomputes("core_attn"):
        inputs = _roped(config, z) + packed
        core = Tape([core]).recomputed("attention", inputs)
        core = dataclasses.replace(core, keeps=core.keeps + z.e * z.n * a * d // z.t)  # the projection's input
    steps = [
        norm,
        _column("qkv", z, h, packed, packed * h // z.n),
        core,
        _row("proj", z, z.e * z.n * a * d // z.t, h),
        *[drop] * bool(config.hidden_dropout),
        dataclasses.replace(norm, name=norm.name.replace("norm", "norm 2", 1)),
    ]
    mlp = [
        _column("fc1", z, h, z.e * z.n * halves * f, z.e * halves * f * h),
        _activation(config, z, f),
        _row("fc2", z, z.e * z.n * f, h),
    ]
    if config.recomputes("mlp"):
        mlp = [Tape(mlp).recomputed("mlp", x)]
    steps += [*mlp, *[drop] * bool(config.hidden_dropout)]
    return Tape(dataclasses.replace(s, backward=s.backward + x) for s in steps)  # the stream's own gradient waits


def output(config: TransformerConfig, z: Sizes) -> Tape:
    """Final norm, output layer, loss."""
    h, columns = config.hidden_size, z.n * config.padded_vocab_size(z.t) // z.t
    half = z.e * columns if z.e < 4 else 0
    loss = Step("loss", 4 * columns + 13 * z.n, z.e * columns, half)
    return Tape(
        [_norm(config, z, "final norm"), _column("output", z, h, z.e * columns, z.e * columns * h // z.n), loss]
    )


def _norm(config: TransformerConfig, z: Sizes, name: str) -> Step:
    x = z.stream(config.hidden_size)
    rows = x // z.e // config.hidden_size
    if config.normalization == "LayerNorm":
        return Step(name, x + 8 * rows, x, 2 * x)
    wide = x // z.e * 4
    return Step(name, 2 * wide + 4 * rows, 2 * wide, 4 * wide)  # five; the normed x is gone by then


def _of_input(config: TransformerConfig, z: Sizes) -> int:
    """What a norm keeps of its input itself: an RMSNorm in 16 bits keeps an fp32 copy instead."""
    return 0 if config.normalization == "RMSNorm" and z.e < 4 else z.stream(config.hidden_size)


def _column(name: str, z: Sizes, h: int, out: int, weight: int) -> Step:
    """x A^T with A cut by its outputs: x is gathered with sequence parallelism, forward and backward."""
    x, whole = z.stream(h), z.e * z.n * h
    gathered = whole if z.sequence_parallel else 0
    return Step(name, x, gathered + out, out + whole + gathered + (weight if z.separate else 0))


def _row(name: str, z: Sizes, part: int, h: int) -> Step:
    """x A^T with A cut by its inputs; the output is a sum over ranks."""
    x, whole = z.stream(h), z.e * z.n * h
    weight = part * h // z.n if z.separate else 0
    keeps = 0 if name == "proj" else part  # attention has kept its output already
    return Step(name, keeps, 2 * whole if z.t > 1 else whole, part + (whole if z.sequence_parallel else x) + weight)


def _roped(config: TransformerConfig, z: Sizes) -> int:
    """q and k after RoPE, and in 16 bits the rounded angles; without RoPE they are parts of the packed qkv."""
    if not config.rotates:
        return 0
    d = config.kv_channels
    heads = config.num_attention_heads // z.t + max(1, config.num_query_groups // z.t)
    return z.e * z.n * d * heads + (2 * z.e * z.n * config.rotary_channels if z.e < 4 else 0)


def _attention(config: TransformerConfig, z: Sizes, packed: int) -> Step:
    a, d = config.num_attention_heads // z.t, config.kv_channels
    q = z.e * z.n * a * d
    if config.attention_backend == "reference":
        scores = 4 * z.b * a * z.s * z.s
        half = scores // 4 * z.e if z.e < 4 else 0  # weights in the model's dtype
        roped = _roped(config, z) - z.e * z.n * d * max(1, config.num_query_groups // z.t) * config.rotates
        keeps = (roped or packed) + 2 * q + scores + half + z.s * z.s + q
        return Step("attention", keeps, 2 * scores, 2 * scores + half + 2 * q)
    copy = q if config.attention_backend == "local" else 0  # heads side by side again
    keeps = _roped(config, z) + packed + q + copy + 4 * z.n * a
    return Step("attention", keeps, copy, 2 * q + packed)


def _activation(config: TransformerConfig, z: Sizes, f: int) -> Step:
    x = z.e * z.n * f
    if config.gated_linear_unit:
        return Step("activation", 3 * x, 0, 3 * x)
    if config.activation == "relu":
        return Step("activation", 0, x, 2 * x)  # it keeps its output, which fc2 keeps too
    if config.activation == "squared_relu":
        return Step("activation", x, x, 4 * x)
    return Step("activation", x, 0, 2 * x)


def layers(config: TransformerConfig, z: Sizes, numbers: Sequence[int]) -> list[tuple[tuple[int, ...], Tape]]:
    """The layers of a stage in groups that run as a whole: their numbers, and their steps."""
    one, x = layer(config, z), z.stream(config.hidden_size)

    def again(group: Sequence[int]) -> tuple[tuple[int, ...], Tape]:
        inside = Tape(step for _ in group for step in one)
        return tuple(group), Tape([inside.recomputed("recomputed", x, _of_input(config, z))])

    if config.recompute_granularity != "full":
        return [((number,), one) for number in numbers]
    n = config.recompute_num_layers
    if config.recompute_method == "uniform":
        return [again(numbers[i : i + n]) for i in range(0, len(numbers), n)]
    return [again([number]) for number in numbers[:n]] + [((number,), one) for number in numbers[n:]]
