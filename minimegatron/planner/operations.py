"""What the operations of a training step take on this machine, each run by itself.

The problem in a sentence: a rate of products and a rate of copies predict a program whose every operation reaches one
of the two, and without fused kernels most of them do neither: SwiGLU is five passes over memory and an exponential.

So each operation of the planner's list (`work.Op`) is run alone, forward and backward, in a few shapes, and three
numbers are fitted to its times:

    seconds = c calls + f FLOPs + b bytes         c, f, b not below 0

How many calls, FLOPs and bytes are in a time is asked of the planner itself: what it predicts (`timing.pass_time`) for
a machine on which a call takes a second and all else nothing, and so on.

| operation      | what runs                                                               |
|----------------|-------------------------------------------------------------------------|
| linear         | `ColumnParallelLinear`, its gradient added to the buffer                |
| attention      | `SelfAttention` without its matrices: heads, RoPE, core attention       |
| norm           | the sum with the residual stream and the norm of it                     |
| activation     | `MLP` without its matrices                                              |
| table          | the embedding of words, its gradient added to the buffer                |
| loss           | cross entropy, and logits in memory that the system has to find first   |
| optimizer      | gradients zeroed, divided, their norm, AdamW                            |

Logits are large, and large tensors are new memory in every microbatch: those that are timed have more than 32 MB, which
glibc always gives back. Heads have 32 channels, as those of small models; of 64 channels a FLOP takes a sixth less. No
model is run, and no step. The shapes are those of no model of `benchmarks/planned.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.footprint.prediction import Work, sizes_of
from minimegatron.footprint.tape import Sizes
from minimegatron.layers.attention.self_attention import AttentionContext, SelfAttention
from minimegatron.layers.embedding import VocabParallelEmbedding
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init
from minimegatron.layers.rope import RotaryEmbedding
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.stages import ends_work
from minimegatron.planner.timing import PassTime, around, one_of_each, pass_time
from minimegatron.planner.work import Op, work_of

Run = Callable[[], object]
Counts = tuple[float, float, float]
SIDES = [(256, 192, 384), (512, 384, 1024), (512, 1024, 384), (768, 512, 1536)]  # tokens, inputs, outputs
SHAPES = [
    (192, 32, 256, 1),
    (384, 32, 256, 4),
    (320, 32, 1024, 1),
    (384, 32, 768, 1),
]  # width, of a head, s, b  # width, of a head, s, b
WORDS = [(256, 2048), (512, 6144)]  # tokens, vocabulary
LOGITS = (1024, 9216)
UPDATED = (96, 320)  # width of a model


@dataclasses.dataclass(frozen=True)
class Trial:
    """One operation in one shape.

    Attributes:
        kind: of the operation.
        asked: calls, FLOPs and bytes, forward and backward.
        run: it, once.
    """

    kind: str
    asked: Counts
    run: Run


@dataclasses.dataclass(frozen=True)
class Timed:
    """A trial and its seconds."""

    kind: str
    asked: Counts
    seconds: float


class Through(nn.Identity):
    """In the place of a matrix."""

    def __init__(self, inputs: int, outputs: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = torch.empty(outputs, inputs, device="meta")


def trials() -> Iterator[Trial]:
    """All of them."""
    for n, i, o in SIDES:
        yield linear(n, i, o)
    for h, d, s, b in SHAPES:
        config = model(h, h // d)
        z = sizes_of(config, Mesh.serial(), OptimizerConfig(), Work(s, b))
        yield from (attention(config, z), norm(config, z), activation(config, z))
    for n, vocabulary in WORDS:
        z = sizes_of(model(256, 8, vocabulary), Mesh.serial(), OptimizerConfig(), Work(n))
        yield table(z.config, z)
    z = sizes_of(model(256, 8, LOGITS[1]), Mesh.serial(), OptimizerConfig(), Work(LOGITS[0]))
    yield loss(z.config, z)
    for h in UPDATED:
        yield optimizer(model(h, 8, 4096))


def model(h: int, heads: int, vocabulary: int = 256) -> TransformerConfig:
    """A small model like Llama."""
    return TransformerConfig(
        num_layers=1, hidden_size=h, num_attention_heads=heads, num_query_groups=heads // 2, ffn_hidden_size=3 * h,
        vocab_size=vocabulary, normalization="RMSNorm", activation="swiglu", position_embedding_type="rope",
        add_bias_linear=False, untie_embeddings_and_output_weights=True,
    )  # fmt: skip


def asked(kind: str, predicted: Callable[[Cluster], float]) -> Counts:
    """What is in a prediction: one on a machine where a call takes a second, a FLOP does, a byte does."""
    units = ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    none, *each = (predicted(Cluster(device="cpu", operations={kind: unit})) for unit in units)
    calls, flops, nbytes = (one - none for one in each)
    return calls, flops, nbytes


def trial(kind: str, op: Op, z: Sizes, run: Run) -> Trial:
    """Of an operation that sends nothing."""

    def both(cluster: Cluster) -> float:
        told = pass_time([op], (), z, cluster)
        return told.forward + told.backward

    return Trial(kind, asked(kind, both), run)


def both_passes(call: Callable[..., Any], *inputs: torch.Tensor) -> Run:
    """Forward, and backward with the gradients of every output."""
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = call(*leaves)
    grads = [torch.ones_like(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs = call(*leaves)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), grads)

    return run


def wrapped(module: nn.Module) -> DistributedDataParallel:
    """With a buffer that gradients are added to."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return DistributedDataParallel(module, Mesh.serial())


def linear(n: int, i: int, o: int) -> Trial:
    layer = ColumnParallelLinear(i, o, ALONE, init=Init(), bias=False)
    z = sizes_of(model(256, 8), Mesh.serial(), OptimizerConfig(), Work(n))
    (op,) = work_of(layer, z)
    return trial("linear", op, z, both_passes(wrapped(layer), torch.rand(n, 1, i)))


def attention(config: TransformerConfig, z: Sizes) -> Trial:
    module = SelfAttention(config, z.mesh, column=Through, row=Through)
    (op,) = work_of(module, z)
    rotary = RotaryEmbedding(config)(torch.arange(z.s).expand(z.b, -1))
    rows = torch.rand(z.s, z.b, module.linear_qkv.weight.shape[0])
    return trial("attention", op, z, both_passes(lambda x: module(x, AttentionContext(rotary)), rows))


def norm(config: TransformerConfig, z: Sizes) -> Trial:
    module = Norm(config)
    (op,) = work_of(module, z)
    streams = [torch.rand(z.s, z.b, config.hidden_size) for _ in range(2)]
    return trial("norm", op, z, both_passes(wrapped(module), *streams))


def activation(config: TransformerConfig, z: Sizes) -> Trial:
    module = MLP(config, z.mesh, column=Through, row=Through)
    (op,) = work_of(module, z)
    return trial("activation", op, z, both_passes(module, torch.rand(z.s, z.b, module.linear_fc1.weight.shape[0])))


def table(config: TransformerConfig, z: Sizes) -> Trial:
    module = VocabParallelEmbedding(config.vocab_size, config.hidden_size, z.mesh.tp, init=Init())
    (op,) = work_of(module, z)
    return trial("table", op, z, both_passes(wrapped(module), torch.arange(z.n).view(1, -1)))


def loss(config: TransformerConfig, z: Sizes) -> Trial:
    op = ends_work(one_of_each(config, z.mesh), z)[1][-1]
    labels, words = torch.arange(z.n).view(-1, 1), torch.rand(config.vocab_size, 1)

    def call(x: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(F.linear(x, words), labels, z.mesh.tp)

    return trial("loss", op, z, both_passes(call, torch.rand(z.n, 1, 1)))


def optimizer(config: TransformerConfig) -> Trial:
    mesh, none = Mesh.serial(), PassTime(0.0, 0.0, 0.0, {})
    ddp = wrapped(build_model(config, mesh, 0))
    made = build_optimizer(OptimizerConfig(), ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)

    def run() -> None:
        ddp.zero_grad_buffer()
        ddp.scale_gradients(0.5)
        made.step()

    counts = asked("optimizer", lambda cluster: around(RunConfig(config), 0, 1, cluster, none).parts["optimizer"])
    return Trial("optimizer", counts, run)


def fitted(asked: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """c, f and b that come nearest to all times, each error as a share of its time; few of them where few do."""
    times = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.tensor(asked, dtype=torch.float64) / times[:, None]
    unit = rows.amax(0).clamp(min=1e-30)
    best, least = [0.0] * 3, float("inf")
    for used in itertools.chain.from_iterable(itertools.combinations((2, 1, 0), k) for k in (1, 2, 3)):
        some = (rows / unit)[:, list(used)]
        found = torch.linalg.lstsq(some, torch.ones_like(times)[:, None]).solution[:, 0]
        error = float((some @ found - 1).square().sum())
        if bool((found > 0).all()) and bool((some.amax(0) > 0).all()) and error < least - 1e-9:
            best, least = [0.0] * 3, error
            for number, value in zip(used, found, strict=True):
                best[number] = float(value / unit[number])
    return best


def fits(times: Iterable[Timed]) -> dict[str, list[float]]:
    """{kind: c, f, b}."""
    found: dict[str, list[Timed]] = {}
    for one in times:
        found.setdefault(one.kind, []).append(one)
    return {kind: fitted([t.asked for t in of], [t.seconds for t in of]) for kind, of in found.items()}
