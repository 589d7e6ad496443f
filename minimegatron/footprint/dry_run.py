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
and tapes are put together to stages (`StageRun`).

Numbers that a layer wants to read do not exist. Loads of experts are those that the dispatcher expects
(`layers.recompute.to_host`); any other question raises `Unpredicted`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
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
from torch.utils.flop_counter import flop_registry

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm.mesh import AXES, Mesh
from minimegatron.config import TransformerConfig
from minimegatron.footprint.gpu import computing_on_gpu
from minimegatron.layers.moe.dispatch import LOADS, Loads
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.layers.wgrad import WeightGradStore, compute_wgrads, deferring_wgrad
from minimegatron.models.decoder import GPTModel
from minimegatron.models.spec import ModuleSpec
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.pipeline.execution import TensorSpec


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of it.
        keeps: bytes for the backward pass.
        forward, backward: bytes that are alive besides while it runs.
        puts_off: bytes that stay for the weights' half of a split backward pass.
    """

    name: str
    keeps: int = 0
    forward: int = 0
    backward: int = 0
    puts_off: int = 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """The memory at one step.

    Attributes:
        kept: bytes kept for backward passes.
        workspace: bytes alive besides.
        where: `backward mlp.linear_fc1`.
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

    @property
    def put_off(self) -> int:
        """Bytes that stay where the weights' half of the backward pass is put off."""
        return sum(step.puts_off for step in self)

    def highest(self, backward: bool, splits: bool = False) -> Moment:
        """The fullest moment on the way forward or back.

        Args:
            backward: the way.
            splits: the weights' half is put off.
        """
        kept, found = 0, [Moment(0, 0, "")]
        later = self.put_off if backward and splits else 0
        for step in self:
            kept += step.keeps
            later -= step.puts_off if backward and splits else 0
            way = f"{'backward' if backward else 'forward'} {step.name}"
            found.append(Moment(kept + later, step.backward if backward else step.forward, way))
        return max(found, key=lambda moment: moment.total)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One microbatch on one rank.

    Attributes:
        config, mesh: the model, and this rank's place.
        s, b: tokens of a sample that are here, samples.
        adds_products: a product of a linear layer is added to the buffer of gradients as it is computed; else the
            gradient of a weight exists by itself first, because the buffer has another dtype.
        documents: samples are made of documents that do not see each other.
        device: type of it.
        crowded: the experts of this rank get all tokens that they can, and not an equal share.
        spec: of each layer; default the model's.
    """

    config: TransformerConfig
    mesh: Mesh
    s: int
    b: int
    adds_products: bool = True
    documents: bool = False
    device: str = "cpu"
    crowded: bool = False
    spec: ModuleSpec | None = None

    @property
    def e(self) -> int:
        """Bytes of an element of a weight, and of an activation."""
        return self.config.dtype.itemsize

    @property
    def t(self) -> int:
        return self.mesh.tp.size

    @property
    def n(self) -> int:
        """Tokens between the two linear layers of a pair."""
        return self.s * self.b

    @property
    def n_cut(self) -> int:
        """Tokens in norms, dropout and residuals."""
        return self.n // (self.t if self.mesh.sequence_parallel else 1)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        wide = 4 if self.config.fp32_residual_connection else self.e
        return wide * self.n_cut * self.config.hidden_size


class Unpredicted(Exception):
    """What is not known, in words."""


def require_known(known: bool, what: str) -> None:
    """Raise `Unpredicted`, unless it is known."""
    if not known:
        raise Unpredicted(what)


_COUNTS = {str(packet): count for packet, count in flop_registry.items()}
Part = tuple[tuple[int, ...], Tape]  # numbers of layers that run as a whole, and their steps
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
        results, given = list(_tensors(result)), [*_tensors(args), *_tensors(list((kwargs or {}).values()))]
        for leaf in results:
            self.see(leaf)
        own = {leaf.untyped_storage()._cdata for leaf in given}
        new = [leaf for leaf in results if leaf.untyped_storage()._cdata not in own]
        name, count, mutates = _about(func)
        flops = float(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0.0
        if (new and given) or flops or mutates:
            self.products += bool(flops)
            nbytes = sum(leaf.numel() * leaf.element_size() for leaf in (*given, *(new or results)))
            operation = Operation(name, flops, nbytes, results[0].element_size() if results else 0)
            self.window.done.append((self.now, operation))
        return result


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """In nested lists and tuples: what operators take and give."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


@functools.cache
def _about(operator: Any) -> tuple[str, Callable[..., int] | None, bool]:
    """Its name, what counts its FLOPs, and whether it changes an argument."""
    name = str(operator._overloadpacket)
    return name, _COUNTS.get(name.removesuffix("_")), operator._schema.is_mutable


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
        lasting: bytes of each part that stay until the step ends; before the first part, in each, behind the last.
        put_off: {number of a window: bytes that stay for the weights' half of a split backward pass}.
        expects: loads of experts are taken to be what they might not be.
    """

    windows: list[Window]
    lasting: list[int]
    put_off: dict[int, int]
    expects: bool = False

    @functools.cached_property
    def tapes(self) -> list[Tape]:
        """What runs before the first part, each part, and what runs behind the last one."""
        found: list[list[Step]] = [[] for _ in self.lasting]
        kept, later = 0, sum(self.put_off.values())
        for number, window in enumerate(self.windows):
            off = self.put_off.get(number, 0)
            kept, later = kept + window.keeps, later - off
            if window.keeps or window.most:
                forward, backward = (window.most.get(phase, kept) - kept for phase in (FORWARD, BACKWARD))
                name = window.name or ("batch" if window.part == 0 else "loss")
                found[window.part].append(Step(name, window.keeps, forward, backward - later, off))
        return [Tape(steps) for steps in found]

    @property
    def weights(self) -> int:
        """Bytes that are alive at the fullest moment of the weights' half, besides what has been put off."""
        most = max((window.most.get(WEIGHTS, 0) for window in self.windows), default=0)
        return max(0, most - sum(self.put_off.values()))


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
    numbers, config = [number for some in layers for number in some], z.config
    gpu: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if z.device == "cuda":
        config, gpu = config.replace(kernels="torch" if config.kernels == "torch" else "cuda"), computing_on_gpu()
    loads = Loads(z.crowded)
    token = LOADS.set(loads)
    try:
        with FakeTensorMode(), async_ops.alone(async_ops.FakeTransport()), trace.silence(), gpu:
            model = GPTModel(config, z.mesh, z.spec, pre_process=first, post_process=last, layer_numbers=numbers)
            grad_dtype = z.config.dtype if z.adds_products else torch.float32
            ddp = DistributedDataParallel(model, z.mesh, grad_dtype=grad_dtype)
            with StepHooks(ddp, z.mesh).passes(1.0):
                run = _run(model, ddp, z, layers, splits)
        return dataclasses.replace(run, expects=loads.asked)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise Unpredicted(f"a layer that asks for numbers ({error})") from error
    finally:
        LOADS.reset(token)


def _run(model: GPTModel, ddp: DistributedDataParallel, z: Sizes, layers: Sequence[Sequence[int]], splits: bool) -> Run:
    names = {module: name for name, module in model.named_modules()}
    for number, layer in model.decoder.layers.items():
        names |= {module: name or f"layer {number}" for name, module in layer.named_modules()}
    parts = [[model.decoder.layers[str(number)] for number in some] for some in layers]
    lasting, before = [0] * (len(parts) + 2), set[int]()
    while True:
        recorder = Recorder(parts, names)
        recorder.ignored |= before
        recorder.ignore(*model.parameters(), *model.buffers(), *(buffer.data for buffer in ddp.grad_buffers))
        put_off = _microbatch(model, recorder, z, splits)
        left = recorder.left_over()
        if not left:
            return Run(recorder.windows, lasting, put_off)
        for key, (part, nbytes) in left.items():  # what the first microbatch has made, the next one finds
            lasting[part] += nbytes
            before.add(key)


def _shape(spec: TensorSpec) -> torch.Size:
    assert spec.shape is not None, "a plan is for microbatches of one length"
    return spec.shape


def _microbatch(model: GPTModel, recorder: Recorder, z: Sizes, splits: bool) -> dict[int, int]:
    """Forward, loss and backward; what the weights' half needs."""
    queue = WeightGradStore() if splits else None
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
        with deferring_wgrad(model, queue):
            output = model(batch["tokens"], None, batch["labels"], document_ids=batch.get("document_ids"), inputs=x)
            ys = [(output * batch["loss_mask"]).sum()] if model.post_process else [output[n] for n in outputs]
        edges = [torch.autograd.graph.get_gradient_edge(y) for y in ys if y.requires_grad]
        del output, ys
        recorder.forward_ended()
        dys = [torch.zeros(_shape(t), dtype=t.dtype) for t in outputs.values() if t.has_gradient] or None
        with deferring_wgrad(model, queue):
            torch.autograd.backward(edges, dys)
        del edges, dys, x, batch
        put_off = recorder.backward_ended()
        if queue is not None:
            compute_wgrads(queue.take())
    return put_off


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What two layers have in common that run alike: classes, shapes, and plain attributes but the layer's number."""
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
    """A number for what is the same object; 0: there is none. It stays alive, so that no other one gets its number."""
    return 0 if spec is None else id(_SPECS.setdefault(id(spec), spec))


def kinds_of(config: TransformerConfig, spec: ModuleSpec | None = None) -> tuple[int, ...]:
    """For each layer of a model the number of the first one of its kind."""
    key = config, _name_of(spec)
    if key not in _KINDS:
        found = dict[tuple[Any, ...], int]()
        with torch.device("meta"):
            model = GPTModel(config, Mesh.serial(), spec, pre_process=False, post_process=False)
        _KINDS[key] = tuple(found.setdefault(kind_of(layer), int(n)) for n, layer in model.decoder.layers.items())
    return _KINDS[key]


class StageRun:
    """A stage, known from a run of one part of each kind.

    Args:
        model: the stage; may be on torch's `meta` device.
        z: a microbatch.
        splits: the weights' half of the backward pass is put off.

    Attributes:
        parts: numbers of the layers that run as a whole, and their tape; no numbers before the first and behind the
            last.
        lasting: bytes that are made in a step once, and stay until it ends.
        weights: bytes at the fullest moment of the weights' half, besides what has been put off.
        expects: loads of experts are taken to be what they might not be.

    Raises:
        Unpredicted: a layer wants to read numbers.
    """

    def __init__(self, model: GPTModel, z: Sizes, splits: bool = False) -> None:
        numbers = {module: int(number) for number, module in model.decoder.layers.items()}
        groups = [(group, again) for group, again in _groups(model, list(numbers)) if group]
        kinds = [(again, tuple(map(kind_of, group))) for group, again in groups]
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


def _groups(model: GPTModel, layers: list[nn.Module]) -> Iterator[tuple[list[nn.Module], bool]]:
    """Layers that are recomputed together, and every other layer by itself."""
    for group, again in model.decoder.groups(layers):
        yield from [(group, True)] if again else [([layer], False) for layer in group]


_RUNS: dict[tuple[Any, ...], Run] = {}


def run_of(
    z: Sizes, layers: Sequence[Sequence[int]], kinds: tuple[Any, ...], first: bool, last: bool, splits: bool = False
) -> Run:
    """`run_stage`, once for each of these `kinds` of parts, layout and microbatch."""
    parallel, axes = z.mesh.parallel, [z.mesh.axis(name) for name in AXES]
    alike = ("tp", "cp", "ep", "etp")  # of other axes a layer sees only whether there are more ranks than one
    place = tuple((a.name, a.size, a.rank) if a.name in alike else (a.name, a.size > 1) for a in axes)
    how = (parallel.sequence_parallel, parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes)
    what = (z.s, z.b, z.adds_products, z.documents, z.device, z.crowded, _name_of(z.spec))
    key = (z.config, place, how, what, kinds, first, last, splits)
    if key not in _RUNS:
        _RUNS[key] = run_stage(z, layers, first, last, splits)
    return _RUNS[key]
