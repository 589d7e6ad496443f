"""Layers by kind: one layer of each kind is run (`footprint/dry_run`), and a stage is put together from these runs.

The problem in a sentence: a model of 126 layers has one or two kinds of layer, and a search asks for thousands of
layouts.

Layers are of one kind if their classes, shapes and plain attributes are equal (`kind_of`); only the number of a layer,
and what recompute does with it, may differ. So for each kind one layer runs:

| asked              | run                                                               | cached by                 |
|--------------------|-------------------------------------------------------------------|---------------------------|
| a stage            | forward and backward of one part of each kind (`StageRun`)        | kinds, layout, microbatch |
| model FLOPs        | forward of one layer of each kind on `meta` (`forward_products`)  | model, sequence length    |

A part is what runs as a whole: a layer, or the layers that are recomputed together.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from minimegatron.comm import async_ops
from minimegatron.comm.mesh import AXES, Mesh
from minimegatron.comm.transport import FakeTransport
from minimegatron.config import TransformerConfig
from minimegatron.footprint.dry_run import Run, Sizes, Tape, module_names, run_stage
from minimegatron.footprint.events import FORWARD, Message, Operation, Sent
from minimegatron.footprint.gpu import counting_attention
from minimegatron.footprint.recorder import Recorder, recording
from minimegatron.footprint.shapes import ShapesAlone
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.chunks import build_stage
from minimegatron.models.spec import ModuleSpec


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for layers that run alike: classes, shapes, and plain attributes but the layer's number."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if _is_plain(v)}
        tensors = [(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in module.named_parameters(recurse=False)]
        plain.pop("layer_number", None)
        found.append((name, type(module), tuple(sorted(plain.items(), key=lambda item: item[0])), tuple(tensors)))
    return tuple(found)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | torch.dtype | FunctionType | None)


_SPECS: dict[int, ModuleSpec] = {}
_KINDS: dict[tuple[TransformerConfig, int], tuple[int, ...]] = {}


def _name_of(spec: ModuleSpec | None) -> int:
    """A number for each spec, 0 for None. The spec is kept alive, so that no other one gets its id."""
    return 0 if spec is None else id(_SPECS.setdefault(id(spec), spec))


def kinds_of(config: TransformerConfig, spec: ModuleSpec | None = None) -> tuple[int, ...]:
    """For each layer of a model the number of the first layer of its kind, recompute aside."""
    config = config.replace(recompute_granularity=None)
    key = config, _name_of(spec)
    if key not in _KINDS:
        found = dict[tuple[Any, ...], int]()
        with torch.device("meta"):
            model = build_stage(config, Mesh.serial(), spec, pre_process=False, post_process=False)
        _KINDS[key] = tuple(found.setdefault(kind_of(layer), n) for n, layer in model.layers.items())
    return _KINDS[key]


def one_of_each(config: TransformerConfig, mesh: Mesh, spec: ModuleSpec | None = None) -> Any:
    """The model with one layer of each kind as a single stage, on the `meta` device."""
    with torch.device("meta"):
        return build_stage(config, mesh, spec, layer_numbers=sorted(set(kinds_of(config, spec))))


Products = list[tuple[int, str, float]]
_PRODUCTS: dict[tuple[TransformerConfig, int, bool, int], Products] = {}


def forward_products(
    config: TransformerConfig, s: int, causal: bool = True, spec: ModuleSpec | None = None
) -> Products:
    """The products of one sequence of s tokens in a forward pass of the whole model in one process.

    Only shapes are needed: the layers run on torch's `meta` device.

    Args:
        causal: attention counts the pairs that its mask shows; else the full square of queries and keys.

    Returns:
        (How often, name of the module, FLOPs) for each product.
    """
    key = config, s, causal, _name_of(spec)
    if key not in _PRODUCTS:
        _PRODUCTS[key] = _products(config, s, causal, spec)
    return _PRODUCTS[key]


def _products(config: TransformerConfig, s: int, causal: bool, spec: ModuleSpec | None) -> Products:
    kinds, mesh = kinds_of(config, spec), Mesh.serial(device="meta")
    with counting_attention(causal), async_ops.alone(FakeTransport()), ShapesAlone(), torch.device("meta"):
        model = one_of_each(config, mesh, spec).to("meta")
        recorder = Recorder([[layer] for layer in model.layers.values()], module_names(model))
        ids = torch.zeros(1, s, dtype=torch.int64)
        with recording(recorder), StepHooks(model, mesh).passes(1.0):
            model(ids, labels=ids, **model.blank_inputs(1, s))
    times = {part: kinds.count(number) for part, number in enumerate(model.layers, 1)}
    found = ((recorder.windows[event.window], event.what) for event in recorder.events)
    return [(times.get(w.part, 1), w.name, o.flops) for w, o in found if isinstance(o, Operation) and o.flops]


_RUNS: dict[tuple[Any, ...], Run] = {}


def run_of(
    z: Sizes, layers: Sequence[Sequence[int]], kinds: tuple[Any, ...], first: bool, last: bool, splits: bool = False
) -> Run:
    """`run_stage`, cached: once for each combination of `kinds` of parts, layout and microbatch."""
    parallel, axes = z.mesh.parallel, [z.mesh.axis(name) for name in AXES]
    alike = ("tp", "cp", "ep", "etp")  # of other axes a layer sees only whether there are more ranks than one
    place = tuple((a.name, a.size, a.rank) if a.name in alike else (a.name, a.size > 1) for a in axes)
    how = (parallel.sequence_parallel, parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes)
    what = (z.s, z.b, z.adds_products, z.documents, z.device, z.crowded, _name_of(z.spec))
    key = (z.config, place, how, what, kinds, first, last, splits)
    if key not in _RUNS:
        _RUNS[key] = run_stage(z, layers, first, last, splits)
    return _RUNS[key]


Part = tuple[tuple[int, ...], Tape]  # numbers of layers that run as a whole, and their steps


class StageRun:
    """A stage, composed of runs of one part of each kind.

    Args:
        model: the stage; may be on torch's `meta` device.
        z: a microbatch.
        splits: wgrad is deferred.

    Attributes:
        parts: (numbers of the layers that run as a whole, their tape), in order; the first and the last pair have no
            numbers and are what runs before and after the layers.
        lasting: bytes that are allocated once in a step and stay until it ends.
        weights: bytes of the fullest moment of wgrad, without those that were deferred for it.
        expects: loads of experts were expected ones, which a real run may exceed.

    Raises:
        Unpredicted: a layer reads the value of a tensor.
    """

    def __init__(self, model: Any, z: Sizes, splits: bool = False) -> None:
        numbers = {module: number for number, module in model.layers.items()}
        groups = [(group, again) for group, again in _groups(model) if group]
        kind = kinds_of(z.config, z.spec)
        kinds = [(again, tuple(kind[numbers[layer]] for layer in group)) for group, again in groups]
        some = sorted((kinds.index(kind) for kind in dict.fromkeys(kinds)), key=lambda i: -len(groups[i][0]))
        config = z.config
        if config.recompute_granularity == "full" and config.recompute_method == "block":
            config = config.replace(recompute_num_layers=max(1, sum(groups[i][1] for i in some)))
        layers = [[numbers[layer] for layer in groups[i][0]] for i in some]
        ends, of = (model.pre_process, model.post_process), tuple(kinds[i] for i in some)
        run = run_of(dataclasses.replace(z, config=config), layers, of, *ends, splits)
        place = {kinds[i]: at for at, i in enumerate(some, 1)}
        at = [0, *(place[kind] for kind in kinds), -1]
        parts = [(), *(tuple(numbers[layer] for layer in group) for group, _ in groups), ()]
        self.parts: list[Part] = [(part, run.tapes[i]) for part, i in zip(parts, at, strict=True)]
        self.lasting, self.weights, self.expects = sum(run.lasting[i] for i in at), run.weights, run.expects
        self._run, self._at = run, [i % len(run.lasting) for i in at]

    def messages(self, backward: bool) -> Counter[Message]:
        """{message: how often} of the forward or of the backward pass of a microbatch."""
        events = (event for part in self._at for event in self._run.of_part(part))
        return Counter(e.what.message for e in events if isinstance(e.what, Sent) and (e.phase != FORWARD) == backward)

    def messages_once(self) -> Counter[Message]:
        """{message: how often} that only the first microbatch of a step sends."""
        found = Counter[Message]()
        for (part, message), count in self._run.once.items():
            found[message] += count * self._at.count(part)
        return found


def _groups(model: Any) -> Iterator[tuple[list[nn.Module], bool]]:
    """Groups of layers that are recomputed together, and every other layer by itself."""
    for group, again in model.layer_groups():
        yield from [(group, True)] if again else [([layer], False) for layer in group]
