"""A stage run once without memory: the bytes that it keeps, its products and its messages, whatever its layers are.

The problem in a sentence: a formula knows the layers that its author knew, and a plan is wanted for a layer that
somebody wrote yesterday.

So the layers themselves are asked. Parameters and inputs are torch's fake tensors (`FakeTensorMode`): shapes, dtypes
and storages without memory. Axes have the sizes of the planned layout and no group: a transport that answers every
message at once takes the place of the backend, so that one process stands for any rank of thousands. Forward, loss and
backward run as in training, and a dispatch mode looks on:

| what              | how it is known                                                                       |
|-------------------|---------------------------------------------------------------------------------------|
| bytes alive       | storages of results, through weak references; without weights and gradient buffers    |
| kept for backward | what is alive when the forward pass has ended                                         |
| products          | operators for which torch counts FLOPs (`torch.utils.flop_counter`)                   |
| messages          | what the transport is given                                                           |

There are four phases: forward; backward; again, which is a module's forward pass during the backward pass (recompute);
and weights, the products that a split schedule puts off.

Every operation belongs to a *window*, the time in which one module is the innermost that runs. In the backward pass it
is the window in which the autograd node was made, known by its sequence number. A window becomes a `Step` of a `Tape`,
so runs are put together in the same way as formulas (`tape`).

Numbers that a layer wants to read do not exist. Loads of experts are those that the dispatcher expects
(`layers.recompute.to_host`); any other question raises `Unpredicted`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.footprint.tape import Sizes, Step, Tape, Unpredicted
from minimegatron.layers.deferred import DeferredGradients, compute, deferring
from minimegatron.layers.dispatch import LOADS
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.ddp import DistributedDataParallel
from minimegatron.parallel.execution import TensorSpec

_COUNTS = {str(packet): count for packet, count in flop_registry.items()}
FORWARD, AGAIN, BACKWARD, WEIGHTS = "forward", "again", "backward", "weights"


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one operator asks of the device.

    Attributes:
        name: torch's.
        flops: of a matrix product; 0 of all else.
        nbytes: of all inputs and results.
        element: bytes of an element of the result.
    """

    name: str
    flops: float
    nbytes: int
    element: int


@dataclasses.dataclass
class Sent:
    """A message.

    Attributes:
        name, axis, nbytes: as `trace` counts them.
        beside: a product is computed between its start and the wait for it.
    """

    name: str
    axis: str
    nbytes: int
    beside: bool = False


@dataclasses.dataclass
class Window:
    """The time in which `name` is the innermost module that runs.

    Attributes:
        part: number of the part of the stage that it is in.
        first: sequence number of its first autograd node.
        keeps: bytes of what is alive when the forward pass has ended, and was first saved here.
        most: {phase: most bytes alive in it}.
        done: (phase, operation or message) in order.
    """

    name: str
    part: int
    first: int
    keeps: int = 0
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    done: list[tuple[str, Operation | Sent]] = dataclasses.field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Looks on while a stage runs.

    Args:
        parts: modules of each part, one after the other; what runs outside of them is before the first, or behind the
            last that has run.
        names: of modules that have windows of their own.

    Attributes:
        windows: in the order of the forward pass.
        ignored: keys of storages that are not counted.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Module]], names: dict[nn.Module, str]) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.phase = FORWARD
        self._part_of = {id(m): i for i, some in enumerate(parts, 1) for one in some for m in one.modules()}
        self._parts = len(parts)
        self._tops = {id(one) for some in parts for one in some}
        self._names = {id(module): name for module, name in names.items()}
        self._stack: list[tuple[str, int | None]] = []
        self._begun: set[int] = set()
        self._last = 0
        self.ignored: set[int] = set()
        self._live: dict[int, tuple[Any, int]] = {}
        self._owner: dict[int, tuple[bool, Window]] = {}  # whether autograd has saved it; where it was made or saved
        self._alive = 0
        self.products = 0
        self._backward: Window | None = None
        self._open("")

    # ------------------------------------------------------------------------------------------------- the windows

    def _open(self, name: str) -> None:
        """A window begins in the forward pass."""
        if self.phase != FORWARD:
            return
        self.windows.append(Window(name, self._part, torch.autograd._get_sequence_nr()))

    def entered(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if id(module) not in self._names:
            return
        if id(module) in self._tops and self.phase == FORWARD:
            self._begun.add(id(module))
            self._last = self._part_of[id(module)]
        again = self.phase == FORWARD or torch.is_grad_enabled()  # else an autograd function has called a module
        self._stack.append((self._names[id(module)] if again else "", self._part_of.get(id(module))))
        self._open(self._stack[-1][0])
        if id(module) in self._tops and args and isinstance(args[0], torch.Tensor):
            self._own(args[0], False)

    def left(self, module: nn.Module, args: Any, result: Any) -> None:
        """Forward hook, also where an error ends the forward pass."""
        if id(module) not in self._names:
            return
        self._stack.pop()
        self._open(self._stack[-1][0] if self._stack else "")

    @property
    def _part(self) -> int:
        """The part that runs now; before the first it is 0."""
        return self._within or (self._parts + 1 if len(self._begun) == len(self._tops) else self._last)

    @property
    def _within(self) -> int | None:
        return self._stack[-1][1] if self._stack else None

    @property
    def window(self) -> Window:
        """The one that an operation belongs to which is dispatched now."""
        if self.phase == FORWARD:
            return self.windows[-1]
        if self.now == AGAIN:
            name, part = self._stack[-1]
            return next(w for w in self.windows if w.name == name and part in (w.part, None))
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number < 2**63:
                at = bisect.bisect_right(self.windows, number, key=lambda w: w.first)
                self._backward = self.windows[max(0, at - 1)]
        return self._backward or self.windows[-1]

    @property
    def now(self) -> str:
        """The phase."""
        return AGAIN if self.phase == BACKWARD and self._stack and self._stack[-1][0] else self.phase

    # ------------------------------------------------------------------------------------------------- the memory

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Weights, and buffers that last: their bytes are counted elsewhere."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self.ignored.add(key)
            if key in self._live:
                self._alive -= self._live.pop(key)[1]
                self._owner.pop(key, None)

    def see(self, tensor: torch.Tensor) -> None:
        """A result: its storage is alive from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self.ignored:
            return
        nbytes = storage.nbytes()
        self._live[key] = weakref.ref(storage, partial(self._ended, key)), nbytes
        self._owner[key] = False, self.window
        self._alive += nbytes
        self._sample()

    def _ended(self, key: int, _: object) -> None:
        if key in self._live:
            self._alive -= self._live.pop(key)[1]
            self._owner.pop(key, None)

    def _sample(self) -> None:
        window, phase = self.window, BACKWARD if self.now == AGAIN else self.now
        window.most[phase] = max(window.most.get(phase, 0), self._alive)

    def _own(self, tensor: torch.Tensor, saved: bool) -> None:
        """The tensor is kept in this window, if not in one before."""
        key = tensor.untyped_storage()._cdata
        if self.phase == FORWARD and key in self._owner and not self._owner[key][0]:
            self._owner[key] = saved, self.windows[-1]

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor. One that was made before the first part and is no part's input is shared by all."""
        self.see(tensor)
        _, window = self._owner.get(tensor.untyped_storage()._cdata, (True, self.windows[-1]))
        if window.part and (self._within or self._part > self._parts):
            self._own(tensor, True)
        return tensor

    def forward_ended(self) -> None:
        """What is alive now is kept for the backward pass."""
        self._open("")
        for key, (_, window) in self._owner.items():
            window.keeps += self._live[key][1]
        self.phase = BACKWARD

    def backward_ended(self) -> dict[int, int]:
        """{number of a window: bytes that are alive still}."""
        self.phase, place = WEIGHTS, {id(window): number for number, window in enumerate(self.windows)}
        found: dict[int, int] = {}
        for key, (_, window) in self._owner.items():
            found[place[id(window)]] = found.get(place[id(window)], 0) + self._live[key][1]
        return found

    def left_over(self) -> dict[int, tuple[int, int]]:
        """{key of a storage that is alive: its part, its bytes}."""
        return {key: (window.part, self._live[key][1]) for key, (_, window) in self._owner.items()}

    # ---------------------------------------------------------------------------------------------- the operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf in results:
            self.see(leaf)
        own = {leaf.untyped_storage()._cdata for leaf in given}
        new = [leaf for leaf in results if leaf.untyped_storage()._cdata not in own]
        packet = func._overloadpacket
        count = _COUNTS.get(str(packet).removesuffix("_"))
        flops = float(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0.0
        if (new and given) or flops or func._schema.is_mutable:
            self.products += bool(flops)
            nbytes = sum(leaf.numel() * leaf.element_size() for leaf in (*given, *(new or results)))
            operation = Operation(str(packet), flops, nbytes, results[0].element_size() if results else 0)
            self.window.done.append((self.now, operation))
        return result


class Messages(async_ops.Observer):
    """Writes down what is sent, for a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._under_way: dict[int, tuple[Sent, int]] = {}  # by work: the message, products before it

    def issue(self, work: async_ops.Work) -> None:
        if work.event is not None:
            sent = Sent(work.event["name"], work.event["axis"], work.event["nbytes"])
            self._recorder.window.done.append((self._recorder.now, sent))
            self._under_way[id(work)] = sent, self._recorder.products

    def waited(self, work: async_ops.Work) -> None:
        if id(work) in self._under_way:
            sent, before = self._under_way.pop(id(work))
            sent.beside = self._recorder.products > before


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """In the block the recorder looks on, and what is sent arrives."""
    handles = [
        hooks.register_module_forward_pre_hook(recorder.entered),
        hooks.register_module_forward_hook(recorder.left, always_call=True),
    ]
    alone = async_ops.alone(async_ops.FakeTransport(), Messages(recorder))
    try:
        with alone, torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda x: x), recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------------- a stage


@dataclasses.dataclass(frozen=True)
class Run:
    """A stage that has been run.

    Attributes:
        windows: of the forward pass, in order.
        lasting: {part: bytes that stay until the step ends}.
        put_off: {number of a window: bytes that stay for the weights' half of a split backward pass}.
    """

    windows: list[Window]
    lasting: dict[int, int]
    put_off: dict[int, int]

    def tapes(self, parts: int) -> list[Tape]:
        """What runs before the first part, each part, and what runs behind the last one."""
        found: list[list[Step]] = [[] for _ in range(parts + 2)]
        kept, later = 0, sum(self.put_off.values())
        for number, window in enumerate(self.windows):
            kept += window.keeps
            later -= self.put_off.get(number, 0)
            if window.keeps or window.most:
                forward, backward = (window.most.get(phase, kept) - kept for phase in (FORWARD, BACKWARD))
                off = self.put_off.get(number, 0)
                found[window.part].append(Step(window.name, window.keeps, forward, backward - later, off))
        return [Tape(steps) for steps in found]


def run_stage(z: Sizes, layers: Sequence[Sequence[int]], first: bool, last: bool, splits: bool = False) -> Run:
    """A microbatch through a stage, forward and backward.

    Args:
        z: the model, the place of its rank and the sizes.
        layers: global numbers of the layers of each part.
        first, last: the embedding is here; the loss is.
        splits: the weights' half of the backward pass is put off.

    Raises:
        Unpredicted: a layer wants to read numbers.
    """
    numbers = [number for some in layers for number in some]
    loads = LOADS.set("crowded" if z.crowded else "equal")
    try:
        with FakeTensorMode(), async_ops.alone(async_ops.FakeTransport()), trace.silence():
            model = GPTModel(z.config, z.mesh, z.spec, pre_process=first, post_process=last, layer_numbers=numbers)
            grad_dtype = z.config.dtype if z.adds_products else torch.float32
            ddp = DistributedDataParallel(model, z.mesh, grad_dtype=grad_dtype)
            with StepHooks(ddp, z.mesh).passes(1.0):
                return _run(model, ddp, z, layers, splits)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise Unpredicted(f"a layer that asks for numbers ({error})") from error
    finally:
        LOADS.reset(loads)


def _run(model: GPTModel, ddp: DistributedDataParallel, z: Sizes, layers: Sequence[Sequence[int]], splits: bool) -> Run:
    names = {module: name or "stage" for name, module in model.named_modules()}
    for number, layer in model.decoder.layers.items():
        names |= {module: name or f"layer {number}" for name, module in layer.named_modules()}
    parts = [[model.decoder.layers[str(number)] for number in some] for some in layers]
    lasting, before = dict[int, int](), set[int]()
    while True:
        recorder = Recorder(parts, names)
        recorder.ignored |= before
        recorder.ignore(*model.parameters(), *model.buffers(), *(buffer.data for buffer in ddp.grad_buffers))
        put_off = _microbatch(model, recorder, z, splits)
        left = recorder.left_over()
        if not left:
            return Run(recorder.windows, lasting, put_off)
        for key, (part, nbytes) in left.items():  # what the first microbatch has made, the next one finds
            lasting[part] = lasting.get(part, 0) + nbytes
            before.add(key)


def _shape(spec: TensorSpec) -> torch.Size:
    assert spec.shape is not None, "a plan is for microbatches of one length"
    return spec.shape


def _microbatch(model: GPTModel, recorder: Recorder, z: Sizes, splits: bool) -> dict[int, int]:
    """Forward, loss and backward; what the weights' half needs."""
    queue = DeferredGradients() if splits else None
    inputs, outputs = model.stage_specs(z.b, z.s)
    with recording(recorder):
        batch = {
            "tokens": torch.zeros(z.b, z.s, dtype=torch.int64),
            "labels": torch.zeros(z.b, z.s, dtype=torch.int64),
            "loss_mask": torch.ones(z.b, z.s),
        }
        if z.documents:
            batch["document_ids"] = torch.zeros(z.b, z.s * z.mesh.cp.size, dtype=torch.int64)
        x = {n: torch.zeros(_shape(t), dtype=t.dtype, requires_grad=t.has_gradient) for n, t in inputs.items()} or None
        with deferring(model, queue):
            output = model(batch["tokens"], None, batch["labels"], document_ids=batch.get("document_ids"), inputs=x)
            ys = [(output * batch["loss_mask"]).sum()] if model.post_process else [output[n] for n in outputs]
        edges = [torch.autograd.graph.get_gradient_edge(y) for y in ys if y.requires_grad]
        del output, ys
        recorder.forward_ended()
        dys = [torch.zeros(_shape(t), dtype=t.dtype) for t in outputs.values() if t.has_gradient] or None
        with deferring(model, queue):
            torch.autograd.backward(edges, dys)
        del edges, dys, x, batch
        put_off = recorder.backward_ended()
        if queue is not None:
            compute(queue.take())
    return put_off


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What two layers have in common that run alike: classes, shapes, and plain attributes but the layer's number."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | torch.dtype | None)}
        tensors = [(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in module.named_parameters(recurse=False)]
        plain.pop("layer_number", None)
        found.append((name, type(module), tuple(sorted(plain.items())), tuple(tensors)))
    return tuple(found)


def stage_by_run(model: GPTModel, z: Sizes, splits: bool = False) -> tuple[list[tuple[int, ...]], list[Tape]]:
    """A stage from a run of one part of each kind.

    Args:
        model: the stage; may be on torch's `meta` device.
        z: a microbatch.
        splits: the weights' half of the backward pass is put off.

    Returns:
        Numbers of the layers of each part; the tapes of what runs before them, of each, and of what runs behind them.

    Raises:
        Unpredicted: a layer wants to read numbers.
    """
    numbers = {module: int(number) for number, module in model.decoder.layers.items()}
    groups: list[tuple[list[nn.Module], bool]] = []
    for group, again in model.decoder.groups(list(numbers)):
        groups += [(group, True)] if again else [([layer], False) for layer in group]
    groups = [(group, again) for group, again in groups if group]
    kinds = [(again, tuple(map(kind_of, group))) for group, again in groups]
    some = sorted((kinds.index(kind) for kind in dict.fromkeys(kinds)), key=lambda i: -len(groups[i][0]))
    config = z.config
    if config.recompute_granularity == "full" and config.recompute_method == "block":
        config = config.replace(recompute_num_layers=max(1, sum(groups[i][1] for i in some)))
    layers = tuple(tuple(numbers[layer] for layer in groups[i][0]) for i in some)
    tapes = _stage_of(dataclasses.replace(z, config=config), layers, model.pre_process, model.post_process, splits)
    first, *middle, last = tapes
    of_kind = {kinds[i]: tape for i, tape in zip(some, middle, strict=True)}
    parts = [tuple(numbers[layer] for layer in group) for group, _ in groups]
    return parts, [first, *(of_kind[kind] for kind in kinds), last]


_RUNS: dict[tuple[Any, ...], list[Tape]] = {}


def _stage_of(z: Sizes, layers: tuple[tuple[int, ...], ...], first: bool, last: bool, splits: bool) -> list[Tape]:
    """`run_stage`, asked once for each kind of layers, layout and microbatch."""
    place = {name: rank for name, rank in z.mesh.coordinates.items() if name in ("tp", "cp")}
    how = (z.s, z.b, z.adds_products, z.documents, z.device, z.crowded, id(z.spec))
    key = (z.config, z.mesh.parallel, z.mesh.world.size, tuple(place.items()), how, layers, first, last, splits)
    if key not in _RUNS:
        _RUNS[key] = run_stage(z, layers, first, last, splits).tapes(len(layers))
    return _RUNS[key]
