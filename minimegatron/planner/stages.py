"""What a stage does with a microbatch: the operations of its layers and ends, and those that are done twice.

What is recomputed runs forward again and sends again, up to the last tensor that its backward pass wants: torch's
checkpoint stops there, so the sum behind the last matrix of a layer is not repeated, unless something behind it is kept
(the mask of dropout, the gate of a shared expert, rows that go back to their tokens).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from minimegatron.footprint.dry_run import Sizes
from minimegatron.layers.moe.layer import MoELayer, SharedExperts
from minimegatron.models.block import TransformerLayer
from minimegatron.models.decoder import GPTModel
from minimegatron.planner.work import Message, Op, Product, by_run, entry, work_of


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The operations of a stage, and those of them that the backward pass repeats."""

    ops: tuple[Op, ...]
    repeated: tuple[Op, ...]

    @classmethod
    def of(cls, model: GPTModel, z: Sizes) -> StageWork:
        """Raises `Unpredicted` where an operation is not known."""
        (inside, repeated), (begin, end, more) = layers_work(model, z), ends_work(model, z)
        return cls((*begin, *inside, *end), (*repeated, *more))

    def messages(self, backward: bool) -> Iterator[Message]:
        """Of a pass."""
        yield from (m for op in self.ops for m in op.messages if m.backward == backward)
        if backward:
            yield from (m for op in self.repeated for m in op.messages if not m.backward)


def again(ops: list[Op], to_the_end: bool) -> list[Op]:
    """What of them runs once more where they are recomputed as one; `to_the_end`: all, since what is last is kept."""
    last = len(ops) - 1 if ops and ops[-1].ends else max((i for i, op in enumerate(ops) if op.tail), default=-1)
    if last < 0 or to_the_end:
        return ops
    sends = [i for i, message in enumerate(ops[last].messages) if not message.backward]
    left = tuple(m for i, m in enumerate(ops[last].messages) if i not in sends[-1:])
    return [*ops[:last], dataclasses.replace(ops[last], messages=left), *ops[last + 1 :]]


def layer_work(layer: nn.Module, number: int, z: Sizes) -> tuple[list[Op], list[Op]]:
    """The operations of a layer, and those that run again in its backward pass by themselves."""
    config, repeated, ran = z.config, list[Op](), by_run(layer, number, z)
    if isinstance(layer, TransformerLayer):
        if config.recomputes("core_attn"):
            ops = work_of(layer.self_attention, z, ran)
            repeated += again([op for op in ops if op.what == "core_attention"], False)
        if config.recomputes("moe" if config.has_experts(number) else "mlp"):
            repeated += again(work_of(layer.mlp, z, ran), _keeps_last(layer.mlp, 0.0))
        if config.recomputes("layernorm"):
            norms = (layer.input_layernorm, layer.pre_mlp_layernorm)
            repeated += [op for norm in norms for op in work_of(norm, z, ran)]
    return work_of(layer, z, ran), repeated


def _keeps_last(mlp: nn.Module | None, dropout: float) -> bool:
    """Whether something is kept for the backward pass behind the last matrix of a layer."""
    shared = mlp.shared_experts if isinstance(mlp, MoELayer) else None
    gated = isinstance(shared, SharedExperts) and shared.gate_weight is not None
    return dropout > 0 or gated or (isinstance(mlp, MoELayer) and mlp.overlap)


def layers_work(model: GPTModel, z: Sizes) -> tuple[list[Op], list[Op]]:
    """The same for the layers of a stage, those that are recomputed in groups included."""
    every, repeated, numbers = list[Op](), list[Op](), {layer: int(n) for n, layer in model.decoder.layers.items()}
    for group, whole in model.decoder.groups(list(numbers)):
        inside = [layer_work(layer, numbers[layer], z) for layer in group]
        ops = [op for mine, _ in inside for op in mine]
        every += ops
        kept = bool(group) and _keeps_last(getattr(group[-1], "mlp", None), z.config.hidden_dropout)
        repeated += again(ops, kept) if whole else [op for _, more in inside for op in more]
    return every, repeated


def ends_work(model: GPTModel, z: Sizes) -> tuple[list[Op], list[Op], list[Op]]:
    """What a stage computes before its layers, and behind them; and what of that the backward pass repeats."""
    begin = work_of(model.embedding, z) if model.pre_process and model.embedding is not None else []
    if not model.post_process:
        return begin, [], []
    head = model.output_layer or getattr(model.embedding, "word_embeddings", None)
    assert head is not None and model.decoder.final_layernorm is not None, "a last stage has both"
    (columns, h), tp = head.weight.shape, z.mesh.tp
    before = tuple(entry(tp, z.mesh.sequence_parallel, z, h))
    output = Op("output", Product(z.n, columns, h, element=z.e), messages=before)
    sums = (Message("all_reduce", tp.name, 4 * z.n), Message("all_reduce", tp.name, 8 * z.n)) if tp.size > 1 else ()
    loss = Op("loss", moved=(2.0 * z.e + 8.0) * z.n * columns, messages=sums)
    behind, repeated = [*work_of(model.decoder.final_layernorm, z), output, loss], list[Op]()
    for k, depth in enumerate(model.mtp.layers if model.mtp is not None else (), 1):
        ops = work_of(depth, z, by_run(depth.transformer_layer, z.config.num_layers, z))  # type: ignore[arg-type]
        behind += [*work_of(model.embedding, z), *ops, output, loss, Op("rolls", messages=tuple(_rolls(k, model, z)))]  # type: ignore[arg-type]
        full = z.config.recompute_granularity == "full" and z.config.recompute_method == "uniform"
        repeated += ops if full else layer_work(depth.transformer_layer, z.config.num_layers, z)[1]
    return begin, behind, repeated


def _rolls(k: int, model: GPTModel, z: Sizes) -> Iterator[Message]:
    """Of depth k over cp: ids of labels, of positions that are learned; the gradient of the losses, in fp32."""
    cp, learned = z.mesh.cp, getattr(model.embedding, "position_embeddings", None) is not None
    if cp.size > 1:
        yield from [Message("all_gather", cp.name, 8 * z.n * cp.size)] * (1 + (k > 1) + learned)
        yield Message("all_gather", cp.name, 4 * z.n * cp.size, True)
