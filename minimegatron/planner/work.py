"""What a microbatch asks of a rank: the products of its modules, the memory they touch, and the messages they send.

The problem in a sentence: two layouts hold as many bytes and compute as much, and one of them is twice as fast, because
what travels is another size and goes over another link.

The modules themselves are asked, built on torch's `meta` device for one rank's place, as `footprint` does: their
matrices are already this rank's parts. n tokens of this rank, e bytes an element, m rows that experts get:

| module         | products, forward    | messages forward (with sequence parallelism) | and backward                |
|----------------|----------------------|-----------------------------------------------|-----------------------------|
| column         | n x i x o            | - (all-gather e n i)                          | all-reduce (two of them)    |
| row            | n x i x o            | all-reduce e n o (reduce-scatter)             | - (all-gather)              |
| table of words |                      | all-reduce e n h (reduce-scatter)             | - (all-gather)              |
| core attention | q k^T, weights v     | cp: a ring, all-gather or all-to-all          | and gradients in fp32       |
| experts        | m x h x f, m x f x h | counts, rows there, rows back                 | rows there, rows back       |
| loss           |                      | maximum, sums: 4 n and 8 n                    |                             |

A backward pass has each product twice, for its input and for its weight.

Bytes are those that `trace` counts (`trace.Event`), so they can be compared with a traced step; experts are taken to
get equal loads. A module without a rule is run, as all are for their bytes (`by_run`, `footprint/dry_run`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from minimegatron.footprint.dry_run import BACKWARD, FORWARD, Operation, Sent, Sizes, kind_of, require_known, run_of
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mla import MultiLatentAttention, ReplicatedLinear
from minimegatron.layers.attention.self_attention import SelfAttention
from minimegatron.layers.dropout import Dropout
from minimegatron.layers.embedding import VocabParallelEmbedding
from minimegatron.layers.fp8.linear import ParallelFp8
from minimegatron.layers.fp8.scaling import CurrentScale, DelayedScale, TileScales
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.mlp import MLP
from minimegatron.layers.moe.dispatch import experts_here, planned_loads
from minimegatron.layers.moe.layer import Experts, MoELayer, SharedExperts
from minimegatron.layers.moe.router import TopKRouter
from minimegatron.layers.norm import HeadsNorm, Norm
from minimegatron.models.block import TransformerLayer
from minimegatron.training.flops import attention_pairs


@dataclasses.dataclass(frozen=True)
class Message:
    """One communication, as `trace` names and counts it.

    Attributes:
        name, axis: `all_gather`, `tp`.
        nbytes: its payload.
        backward: it belongs to the backward pass.
        beside: it travels while a product of the same operation is computed.
    """

    name: str
    axis: str
    nbytes: int
    backward: bool = False
    beside: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """`count` products [m, k] x [k, n], in elements of `element` bytes; `unit` computes them."""

    m: float
    n: int
    k: int
    count: int = 1
    element: int = 2
    unit: str = "matmul"  # or `fp8`, or `flash`: an attention that keeps its weights out of memory
    touched: float | None = None  # bytes, where these are others than both factors and the result

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def nbytes(self) -> float:
        """Both factors read, the result written."""
        if self.touched is not None:
            return self.touched
        return float(self.element) * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation of a module.

    Attributes:
        what: its name.
        kind: that of its rule, where `what` is its module's.
        product: computed forward once and backward twice; None where there is none.
        weights: half of the backward products are of weights, which a split backward pass puts off.
        moved: bytes of memory read and written forward besides.
        messages: what it sends, in order.
        ends: nothing behind its product is kept for the backward pass.
        tail: its last message is behind all that its layer keeps.
        moved_back: bytes read and written backward besides; None: `BACK` times those forward.
        passes: products of the forward and of the backward pass, where they are not `product` once and twice.
        calls: how often the host asks for something in each, where it is known.
    """

    what: str
    kind: str = dataclasses.field(default="", kw_only=True)
    product: Product | None = None
    weights: bool = True
    moved: float = 0.0
    messages: tuple[Message, ...] = ()
    ends: bool = False
    tail: bool = False
    moved_back: float | None = None
    passes: tuple[tuple[Product, ...], tuple[Product, ...]] | None = None
    calls: tuple[int, int] | None = None

    def products(self, backward: bool) -> tuple[Product, ...]:
        """Of a pass."""
        if self.passes is not None:
            return self.passes[backward]
        return () if self.product is None else (self.product,) * (2 if backward else 1)


BACK = 1.5  # bytes that a pointwise operation moves backward (input, gradient, result), over those forward
Rule = Callable[[Any, Sizes], Iterable[Op]]
_RULES: dict[type, Rule] = {}


def rule(kind: type) -> Callable[[Rule], Rule]:
    """The operations of modules of this class that are in none of its children."""

    def register(function: Rule) -> Rule:
        _RULES[kind] = function
        return function

    return register


def work_of(module: nn.Module, z: Sizes, ran: Mapping[nn.Module, Op] | None = None) -> list[Op]:
    """The operations of a module and all that is in it, in the order of registration, which is that of the forward.

    Args:
        module, z: the module, and a microbatch.
        ran: what modules without a rule do by themselves, from a run (`by_run`).
    """
    found = []
    for name, part in module.named_modules():
        if ran is not None and part in ran:
            found.append(ran[part])
            continue
        holds = type(part) is not nn.Module and next(part.parameters(recurse=False), None) is not None
        require_known(type(part) in _RULES or not holds, type(part).__name__)
        if type(part) in _RULES and not name.endswith("core_attention.dropout"):  # that of weights is attention's
            found += [dataclasses.replace(op, what=name or op.what, kind=op.what) for op in _RULES[type(part)](part, z)]
    return found


def by_run(layer: nn.Module, number: int, z: Sizes) -> dict[nn.Module, Op]:
    """What the modules of a layer that have no rule do by themselves: the layer is run (`footprint/dry_run`).

    Raises:
        Unpredicted: it wants to read numbers.
    """
    strange = {module: name for name, module in layer.named_modules() if type(module) not in _RULES}
    if not strange:
        return {}
    z = dataclasses.replace(z, config=z.config.replace(recompute_granularity=None))
    windows = run_of(z, [[number]], (kind_of(layer),), False, False).windows
    found = {}
    for module, name in strange.items():
        done = [event for window in windows if window.part == 1 and window.name == name for event in window.done]
        if done:
            found[module] = _recorded(name or type(layer).__name__, done)
    return found


def _recorded(what: str, done: list[tuple[str, Operation | Sent]]) -> Op:
    """Forward and backward as they were run: other operations than products read their inputs and write results."""
    passes = [[event for phase, event in done if phase == which] for which in (FORWARD, BACKWARD)]
    operations = [[event for event in each if isinstance(event, Operation)] for each in passes]
    forward, backward = (
        tuple(Product(o.flops / 2, 1, 1, element=o.element, touched=o.nbytes) for o in each if o.flops)
        for each in operations
    )
    moved, back = (float(sum(o.nbytes for o in each if not o.flops)) for each in operations)
    messages = [
        Message(sent.name, sent.axis, sent.nbytes, bool(way), sent.beside)
        for way, each in enumerate(passes)
        for sent in each
        if isinstance(sent, Sent)
    ]
    calls = len(operations[0]), len(operations[1])
    return Op(
        what, kind="run", weights=False, moved=moved, moved_back=back, messages=tuple(messages),
        passes=(forward, backward), calls=calls,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the modules


@rule(ColumnParallelLinear)
def column(module: ColumnParallelLinear, z: Sizes) -> Iterator[Op]:
    (o, i), tp = module.weight.shape, module.tp
    before = tuple(entry(tp, module.sequence_parallel, z, i, module.fp8))
    yield linear(Op("column", Product(z.n, o, i, element=z.e), messages=before), module.fp8, z)
    if module.gather_output and tp.size > 1:
        back = "reduce_scatter" if module.gather_reduces_gradient else ""
        nbytes = z.e * z.n * o * tp.size
        messages = [Message("all_gather", tp.name, nbytes)] + [Message(back, tp.name, nbytes, True)] * bool(back)
        yield Op("gathered output", messages=tuple(messages))


def entry(tp: Any, cut: bool, z: Sizes, i: int, fp8: ParallelFp8 | None = None) -> Iterator[Message]:
    """What travels before a product whose matrix is cut by its outputs, and on the way back; of FP8 its bytes."""
    if tp.size > 1 and cut:
        element = z.e if fp8 is None else 1
        yield Message("all_gather", tp.name, element * z.n * i)
        yield Message("all_gather", tp.name, element * z.n * i, True, True)
        yield Message("reduce_scatter", tp.name, z.e * z.n * i, True, True)
    elif tp.size > 1:
        yield Message("all_reduce", tp.name, z.e * z.n * i, True, True)


@rule(RowParallelLinear)
def row(module: RowParallelLinear, z: Sizes) -> Iterator[Op]:
    o, i = module.weight.shape
    product = Product(z.n, o, i, element=z.e)
    messages = tuple(_sum(module.tp, module.sequence_parallel, z, o))
    yield linear(Op("row", product, messages=messages, ends=True), module.fp8, z)


def _sum(tp: Any, cut: bool, z: Sizes, o: int) -> Iterator[Message]:
    if tp.size > 1:
        yield Message("reduce_scatter" if cut else "all_reduce", tp.name, z.e * z.n * o)
        if cut:
            yield Message("all_gather", tp.name, z.e * z.n * o, True)


@rule(ReplicatedLinear)
def replicated(module: ReplicatedLinear, z: Sizes) -> Iterator[Op]:
    o, i = module.weight.shape
    yield linear(Op("replicated", Product(z.n_cut, o, i, element=z.e)), module.fp8, z)


def linear(op: Op, fp8: ParallelFp8 | None, z: Sizes) -> Op:
    """As it is, or in FP8: x and dy are read (with current scaling twice), and written in 1 byte, also transposed."""
    if fp8 is None:
        return op
    require_known(not fp8.tiled, "FP8 with a scale for every tile")
    require_known(fp8.wgrad, "FP8 with gradients of weights in another precision")
    p, magnitudes = op.product, list[Message]()
    assert p is not None, "it multiplies"
    for scale, backward in ((fp8.input, False), (fp8.gradient, True)):
        if isinstance(scale, CurrentScale) and scale.axis.size > 1:
            magnitudes.append(Message("all_reduce", scale.axis.name, 4, backward))
    rows, cast = p.count * p.m, 2.0 + z.e * (2 if isinstance(fp8.input, CurrentScale) else 1)
    touched = p.count * (p.m * p.k + p.k * p.n + float(z.e) * p.m * p.n)
    product = dataclasses.replace(p, unit="fp8", touched=touched)
    return dataclasses.replace(
        op, product=product, moved=op.moved + cast * rows * p.k, moved_back=BACK * op.moved + cast * rows * p.n,
        messages=(*magnitudes, *op.messages),
    )  # fmt: skip


@rule(VocabParallelEmbedding)
def table(module: VocabParallelEmbedding, z: Sizes) -> Iterator[Op]:
    """Its gradient is one of all words: zeros written, rows added, and the whole added to the buffer."""
    h, rows = module.weight.shape[1], 3.0 * z.e * z.n * module.weight.shape[1]
    back = BACK * rows + (2.0 * z.e + 8.0) * module.weight.numel()
    messages = tuple(_sum(module.tp, module.sequence_parallel, z, h))
    yield Op("table", moved=rows, moved_back=back, messages=messages)


@rule(Norm)
def norm(module: Norm, z: Sizes) -> Iterator[Op]:
    """Read and written once, and the sum with the residual stream beside it."""
    yield Op("norm", moved=5.0 * z.e * z.n_cut * module.weight.shape[0])


@rule(HeadsNorm)
def norm_of_heads(module: HeadsNorm, z: Sizes) -> Iterator[Op]:
    """The same on a rank's heads, and a sum over all of them."""
    sums = tuple(Message("all_reduce", module.tp.name, 4 * z.n, backward) for backward in (False, True))
    moved = 5.0 * z.e * z.n * module.weight.shape[0]
    yield Op("norm", moved=moved, messages=sums if module.tp.size > 1 else ())


@rule(MLP)
def activation(module: MLP, z: Sizes) -> Iterator[Op]:
    halves = 2 if module.kind in ("swiglu", "geglu", "geglu_tanh") else 1
    yield Op("activation", moved=(halves + 1.0) * z.e * z.n * module.linear_fc2.weight.shape[1])


_RULES[SharedExperts] = activation
for holder in (TransformerLayer, SelfAttention, ParallelFp8, CurrentScale, DelayedScale, TileScales, nn.ModuleDict):
    _RULES[holder] = lambda module, z: ()  # all that it does is its parts'


@rule(Dropout)
def dropout(module: Dropout, z: Sizes) -> Iterator[Op]:
    """Of both branches of a layer."""
    if module.p > 0:
        yield Op("dropout", moved=2.0 * (2 * z.e + 1) * z.n_cut * z.config.hidden_size)


@rule(CoreAttention)
def attention(module: CoreAttention, z: Sizes) -> Iterator[Op]:
    """The pairs that a causal mask shows; moved are q, k, v and o, and a statistic a row. A program that keeps all
    weights (`reference`) computes and moves the whole square: written, read, dropped, read.
    """
    config, mesh = z.config, z.mesh
    a, d = config.num_attention_heads // z.t, config.kv_channels
    g = a if config.multi_latent_attention else max(1, config.num_query_groups // z.t)
    inner, outer = mesh.cp_inner, mesh.cp_outer
    s, c = z.s * mesh.cp.size, mesh.cp.size
    if config.attention_backend == "reference":
        product = Product(z.b * a * s * s / (c * d), d, d, 2, z.e)
        weights = 13.0 * z.b * a * s * z.s
    else:
        pairs, qkvo = attention_pairs(s, config.sliding_window), z.n * (2 * a + 2 * g) * d
        product = Product(z.b * a * pairs / (c * d), d, d, 2, z.e, "flash", z.e * qkvo + 4.0 * z.n * a)
        weights = 0.0
    moved = 2.0 * z.e * z.n * (a + 2 * g) * d + weights
    groups = math.lcm(g, inner.size)
    there, back = (_heads(inner, z.e * z.n * heads * d) for heads in (a + 2 * groups, a))
    blocks = _blocks(outer, z, 2 * z.n * groups * d) if outer.size > 1 else ()
    yield Op("attention", product, False, moved, (*there, *blocks, *back), ends=inner.size > 1)


def _blocks(axis: Any, z: Sizes, elements: int) -> Iterator[Message]:
    """Keys and values of all ranks of a ring, and their gradients in fp32."""
    if z.mesh.parallel.cp_comm_type == "allgather":
        for backward in (False, True):
            yield Message("all_gather", axis.name, z.e * elements * axis.size, backward)
        yield Message("reduce_scatter", axis.name, 4 * elements * axis.size, True)
        return
    for _ in range(axis.size - 1):
        yield Message("ring_shift", axis.name, z.e * elements, False, True)
        yield Message("ring_shift", axis.name, z.e * elements, True, True)
        yield Message("ring_shift", axis.name, 4 * elements, True, True)


def _heads(axis: Any, nbytes: int) -> tuple[Message, ...]:
    """Heads for tokens, or tokens for heads."""
    return tuple(Message("all_to_all", axis.name, nbytes, backward) for backward in (False, True) if axis.size > 1)


@rule(MultiLatentAttention)
def latent(module: MultiLatentAttention, z: Sizes) -> Iterator[Op]:
    """The one key that RoPE turns is gathered, or its gradient summed."""
    tp, nbytes = z.mesh.tp.name, z.e * z.n * module.d_r
    if z.mesh.sequence_parallel:
        cut = Message("all_gather", tp, nbytes), Message("reduce_scatter", tp, nbytes, True)
        yield Op("turned key", messages=cut)
    elif z.mesh.tp.size > 1:
        yield Op("turned key", messages=(Message("all_reduce", tp, nbytes, True),))


def router_element(z: Sizes) -> int:
    """Bytes of an element of the router's products."""
    return max(z.e, 8 if z.config.moe_router_dtype == "fp64" else 4)


def tokens_and_rows(z: Sizes) -> tuple[int, int, int]:
    """Tokens of this rank; rows that it sends; rows that its experts get."""
    assert z.config.num_experts is not None
    ep, first = z.mesh.ep, experts_here(z.config.num_experts, z.mesh.ep)
    loads = planned_loads(z.n_cut, z.config, slice(*first))
    return z.n_cut, sum(loads), sum(loads[slice(*first)]) * ep.size * z.mesh.etp.size


@rule(TopKRouter)
def router(module: TopKRouter, z: Sizes) -> Iterator[Op]:
    config, mesh, wide = z.config, z.mesh, router_element(z)
    require_known(config.moe_router_load_balancing_type != "sinkhorn", "sinkhorn's sweeps, whose number is in the data")
    messages = []
    for kind, _ in config.balancing_losses:
        axis = mesh.tp_dp_cp if kind == "global_aux_loss" else mesh.tp_cp
        rows = z.b if kind == "seq_aux_loss" else 1
        messages += [Message("all_reduce", axis.name, 8 * rows * module.num_experts)] * (axis.size > 1)
    product = Product(z.n_cut, module.num_experts, config.hidden_size, element=wide)
    yield Op("router", product, moved=6.0 * wide * z.n_cut * module.num_experts, messages=tuple(messages))


@rule(Experts)
def experts(module: Experts, z: Sizes) -> Iterator[Op]:
    rows = tokens_and_rows(z)[2]
    local, o, h = module.weight1.shape
    f = module.weight2.shape[2]
    fc1, fc2 = None, None
    if module.fp8 is not None:
        require_known(module.etp.size == 1, "FP8 of experts that are cut over etp")
        fc1, fc2 = next(iter(module.fp8.values()))  # type: ignore[misc]
    op = Op("fc1 of experts", Product(rows / local, o, h, local, z.e), moved=z.e * rows * (o + 2.0 * f))
    yield linear(op, fc1, z)
    yield linear(Op("fc2 of experts", Product(rows / local, h, f, local, z.e)), fc2, z)


@rule(MoELayer)
def dispatch(module: MoELayer, z: Sizes) -> Iterator[Op]:
    """Rows there and back; see `layers/moe/dispatch`."""
    config, mesh, wide = z.config, z.mesh, router_element(z)
    tokens, sent, rows = tokens_and_rows(z)
    assert config.num_experts is not None
    row, both = z.e * config.hidden_size, mesh.etp_ep
    found: list[Message] = []
    if config.moe_token_dispatcher_type == "allgather" and both.size > 1:
        everyone = tokens * both.size
        found += [Message("all_gather", both.name, everyone * config.num_experts)]  # who wants whom
        for nbytes in (everyone * row, everyone * config.num_experts * wide):
            found += [Message("all_gather", both.name, nbytes), Message("reduce_scatter", both.name, nbytes, True)]
        back = everyone * row
        found += [Message("reduce_scatter", both.name, back), Message("all_gather", both.name, back, True)]
    elif both.size > 1:
        found += [Message("all_gather", both.name, 8 * config.num_experts * both.size)]  # counts
        for axis, number in ((mesh.ep, max(sent, rows // mesh.etp.size)), (mesh.etp, rows)):
            for nbytes in (number * row, number * wide, number * row) if axis.size > 1 else ():
                found += [Message("all_to_all", axis.name, nbytes, back) for back in (False, True)]
    gathers = config.moe_token_dispatcher_type == "allgather" and both.size > 1
    yield Op("dispatch", moved=4.0 * row * rows, messages=tuple(found), tail=gathers)
