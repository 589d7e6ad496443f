"""A stage run once without memory: the bytes that it keeps, its operations and its messages, whatever its layers are.

The problem in a sentence: a formula knows the layers that its author knew, and a plan is wanted for a layer that
somebody wrote yesterday.

So the layers themselves are run. Parameters and inputs are torch's fake tensors (`FakeTensorMode`): shapes, dtypes and
storages without memory. Axes have the sizes of the planned layout and no group: a transport that answers every message
at once replaces the backend, so one process stands for any rank of thousands. Forward, loss and backward run as in
training, and a dispatch mode (`Recorder`) writes down what happens:

| what              | how it is known                                                                       |
|-------------------|---------------------------------------------------------------------------------------|
| bytes alive       | storages of results, through weak references; without weights and gradient buffers    |
| kept for backward | what is alive when the forward pass has ended                                         |
| operations        | operators: FLOPs of products (`gpu.flops_of`), bytes of inputs and results            |
| messages          | what the transport is given, and when it is waited for                                |

Bytes of an operation are those of its inputs and results; of a table only the rows that are looked up. Neighbouring
elementwise operators count as fused, and so does a sum right behind a product (of a bias, or into the buffer of
gradients): what is between the two is neither written nor read.

There are four phases: forward; backward; again, which is a module's forward pass during the backward pass (recompute);
and weights, the products that a split schedule puts off.

Every operation belongs to a *window*, the time in which one module is the innermost that runs. In the backward pass it
is the window in which the autograd node was made, known by its sequence number. The windows of a layer make a `Tape` of
`Step`s, what each keeps and needs besides:

    forward     kept so far + what this step keeps + its workspace
    backward    kept up to and with this step      + its workspace

A stage is put together from runs of one layer of each kind (`StageRun`), which are kept by kind, layout and microbatch.

Numbers that a layer wants to read do not exist. Loads of experts are those that the dispatcher expects
(`layers.recompute.to_host`); any other question raises `Unpredicted`, whose text the tables of a plan show.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

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

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm.mesh import AXES, Mesh
from minimegatron.comm.transport import FakeTransport
from minimegatron.config import TransformerConfig
from minimegatron.footprint.gpu import computing_on_gpu, counting_attention, flops_of
from minimegatron.layers.moe.dispatch import LOADS, Loads
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.layers.wgrad import WeightGradStore, compute_wgrads, deferring_wgrad
from minimegatron.models.chunks import build_stage
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


ALLOCATES = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
ELEMENTWISE = {
    f"aten.{name}"
    for name in "_to_copy add add_ copy_ div exp eq logaddexp masked_fill mul mul_ native_dropout sub where".split()
}
LOOKS_UP = {f"aten.{name}" for name in ("embedding", "gather", "index", "index_select")}
Part = tuple[tuple[int, ...], Tape]  # numbers of layers that run as a whole, and their steps
FORWARD, AGAIN, BACKWARD, WEIGHTS = "forward", "again", "backward", "weights"


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one operator asks of the device.

    Attributes:
        name: torch's.
        flops: of a matrix product, or of attention; 0 of all else.
        nbytes: of memory that is read or written: all inputs and results, of a table the rows that are looked up.
    """

    name: str
    flops: float
    nbytes: int

    @property
    def unit(self) -> str:
        """What computes it: `fp8`, `attention` (and products of many narrow matrices, as in one), or `matmul`."""
        if "_scaled_mm" in self.name:
            return "fp8"
        return "attention" if "attention" in self.name or self.name in ("aten.bmm", "aten.baddbmm") else "matmul"


class Message(NamedTuple):
    """One communication of a rank, as `trace` names and counts it: `all_gather`, `tp`, its payload."""

    name: str
    axis: str
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """A message begins to travel. It is under way until its `Waited`."""

    message: Message


@dataclasses.dataclass(frozen=True)
class Waited:
    """The end of the wait for a message."""

    sent: Sent


class Event(NamedTuple):
    """What happens in the `phase` of a run, in the window of that number."""

    window: int
    phase: str
    what: Operation | Sent | Waited


@dataclasses.dataclass
class Window:
    """The time in which `name` is the innermost module that runs.

    Attributes:
        kind: class of the module.
        part: number of the part of the stage that it is in.
        first: sequence number of its first autograd node.
        keeps: bytes of what is alive when the forward pass has ended, and was first saved here.
        most: {phase: most bytes alive in it}.
    """

    name: str
    kind: str
    part: int
    first: int
    keeps: int = 0
    most: dict[str, int] = dataclasses.field(default_factory=dict)


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
        self._stack: list[tuple[str, str, int | None]] = []  # of a module: name, class, part
        self._begun: set[int] = set()
        self._last = 0
        self.ignored: set[int] = set()
        self._live: dict[int, tuple[Any, int]] = {}
        self._owner: dict[int, tuple[bool, Window]] = {}  # whether autograd has saved it; where it was made or saved
        self._alive = 0
        self.events: list[Event] = []
        self._fresh = dict[int, int]()  # key of what elementwise operations in a row have made -> number of their event
        self.put_off_in: int | None = None  # number of the window whose weights' half runs
        self._backward = 0
        self._open("", "")

    # ------------------------------------------------------------------------------------------------- the windows

    def _open(self, name: str, kind: str) -> None:
        """A window begins in the forward pass."""
        if self.phase == FORWARD:
            self.windows.append(Window(name, kind, self._part, torch.autograd._get_sequence_nr()))

    def entered(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if id(module) not in self._names:
            return
        if id(module) in self._tops and self.phase == FORWARD:
            self._begun.add(id(module))
            self._last = self._part_of[id(module)]
        again = self.phase == FORWARD or torch.is_grad_enabled()  # else an autograd function has called a module
        name, kind = (self._names[id(module)], type(module).__name__) if again else ("", "")
        self._stack.append((name, kind, self._part_of.get(id(module))))
        self._open(name, kind)
        if id(module) in self._tops and args and isinstance(args[0], torch.Tensor):
            self._own(args[0], False)

    def left(self, module: nn.Module, args: Any, result: Any) -> None:
        """Forward hook, also where an error ends the forward pass."""
        if id(module) not in self._names:
            return
        self._stack.pop()
        self._open(*(self._stack[-1][:2] if self._stack else ("", "")))

    @property
    def _part(self) -> int:
        """The part that runs now; before the first it is 0."""
        return self._within or (self._parts + 1 if len(self._begun) == len(self._tops) else self._last)

    @property
    def _within(self) -> int | None:
        return self._stack[-1][2] if self._stack else None

    @property
    def at(self) -> int:
        """The number of the window that an operation belongs to which is dispatched now."""
        if self.phase == FORWARD:
            return len(self.windows) - 1
        if self.put_off_in is not None:
            return self.put_off_in
        if self.now == AGAIN:
            name, _, part = self._stack[-1]
            return next(i for i, w in enumerate(self.windows) if w.name == name and part in (w.part, None))
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number < 2**63:
                self._backward = max(0, bisect.bisect_right(self.windows, number, key=lambda w: w.first) - 1)
        return self._backward

    @property
    def window(self) -> Window:
        return self.windows[self.at]

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
        self._open("", "")
        self._backward = len(self.windows) - 1
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch: else the first operation imports `torch._dynamo`, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results, given = list(_tensors(result)), [*_tensors(args), *_tensors(list((kwargs or {}).values()))]
        for leaf in results:
            self.see(leaf)
        own = {leaf.untyped_storage()._cdata for leaf in given}
        new = [leaf for leaf in results if leaf.untyped_storage()._cdata not in own]
        name, mutates = _about(func)
        count = flops_of(func)
        if name in ALLOCATES or not (new and given or count or mutates):
            return result
        flops = float(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0.0
        if name in LOOKS_UP:  # of the first one, the rows that are in the result
            given = [*given[1:], *new]
        elif name == "aten.copy_":  # the first one is written alone
            given = given[1:]
        touched = [*given, *(new or results)]
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in touched)
        chain = self._fresh if name in ELEMENTWISE else {}
        nbytes -= self._fused(given, chain)
        made = new if flops or name in ELEMENTWISE else []
        self._fresh = chain | {leaf.untyped_storage()._cdata: len(self.events) for leaf in made}
        self.note(Operation(name, flops, nbytes))
        return result

    def _fused(self, given: list[torch.Tensor], chain: dict[int, int]) -> int:
        """Bytes that are not read because the operations right before have made them, which then do not write them."""
        total = 0
        for leaf in given:
            number = chain.pop(leaf.untyped_storage()._cdata, None)
            if number is not None:
                window, phase, maker = self.events[number]
                assert isinstance(maker, Operation), "messages make nothing fresh"
                nbytes = min(leaf.numel() * leaf.element_size(), maker.nbytes)
                self.events[number] = Event(window, phase, dataclasses.replace(maker, nbytes=maker.nbytes - nbytes))
                total += leaf.numel() * leaf.element_size()
        return total

    def note(self, what: Operation | Sent | Waited) -> None:
        """Something happens now."""
        if not isinstance(what, Operation):
            self._fresh = {}
        self.events.append(Event(self.at, self.now, what))


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """In nested lists and tuples: what operators take and give."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


@functools.cache
def _about(operator: Any) -> tuple[str, bool]:
    """Its name, and whether it changes an argument."""
    return str(operator._overloadpacket), operator._schema.is_mutable


class Messages(async_ops.Observer):
    """Calls `note` with a `Sent` for every message, and with its `Waited`."""

    def __init__(self, note: Callable[[Sent | Waited], None]) -> None:
        self._note = note
        self._under_way: dict[int, Sent] = {}  # by the id of a work

    def issue(self, work: async_ops.Work) -> None:
        if work.event is not None:
            sent = Sent(Message(work.event["name"], work.event["axis"], work.event["nbytes"]))
            self._under_way[id(work)] = sent
            self._note(sent)

    def waited(self, work: async_ops.Work) -> None:
        if id(work) in self._under_way:
            self._note(Waited(self._under_way.pop(id(work))))


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """In the block the recorder looks on, and what is sent arrives."""
    handles = [
        hooks.register_module_forward_pre_hook(recorder.entered),
        hooks.register_module_forward_hook(recorder.left, always_call=True),
    ]
    alone = async_ops.alone(FakeTransport(), Messages(recorder.note))
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
        events: operations and messages of all phases, in order.
        once: part and messages that only the first microbatch of a step sends, and how often.
        lasting: bytes of each part that stay until the step ends; before the first part, in each, behind the last.
        put_off: {number of a window: bytes that stay for the weights' half of a split backward pass}.
        expects: loads of experts are taken to be what they might not be.
    """

    windows: list[Window]
    events: list[Event]
    once: Counter[tuple[int, Message]]
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

    def of_part(self, part: int) -> list[Event]:
        """What happens in a part, numbered as before the first, each, and behind the last one."""
        return self._by_part[part]

    @functools.cached_property
    def _by_part(self) -> list[list[Event]]:
        found: list[list[Event]] = [[] for _ in self.lasting]
        for event in self.events:
            found[self.windows[event.window].part].append(event)
        return found

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
        with FakeTensorMode(), async_ops.alone(FakeTransport()), trace.silence(), gpu:
            model = build_stage(config, z.mesh, z.spec, pre_process=first, post_process=last, layer_numbers=numbers)
            grad_dtype = z.config.dtype if z.adds_products else torch.float32
            ddp = DistributedDataParallel(model, z.mesh, grad_dtype=grad_dtype)
            with StepHooks(ddp, z.mesh).passes(1.0):
                run = _run(model, ddp, z, layers, splits)
        return dataclasses.replace(run, expects=loads.asked)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise Unpredicted(f"a layer that asks for numbers ({error})") from error
    finally:
        LOADS.reset(token)


def _run(model: Any, ddp: DistributedDataParallel, z: Sizes, layers: Sequence[Sequence[int]], splits: bool) -> Run:
    parts = [[model.layers[number] for number in some] for some in layers]
    lasting, before, first = [0] * (len(parts) + 2), set[int](), None
    while True:
        recorder = Recorder(parts, _names(model))
        recorder.ignored |= before
        recorder.ignore(*model.parameters(), *model.buffers(), *(buffer.data for buffer in ddp.grad_buffers))
        put_off = _microbatch(model, recorder, z, splits)
        first, left = first or _sent(recorder), recorder.left_over()
        if not left:
            return Run(recorder.windows, recorder.events, first - _sent(recorder), lasting, put_off)
        for key, (part, nbytes) in left.items():  # what the first microbatch has made, the next one finds
            lasting[part] += nbytes
            before.add(key)


def _names(model: Any) -> dict[nn.Module, str]:
    """Of modules; in a layer they begin with the layer."""
    names = {module: name for name, module in model.named_modules()}
    for number, layer in model.layers.items():
        names |= {module: name or f"layer {number}" for name, module in layer.named_modules()}
    return names


def _sent(recorder: Recorder) -> Counter[tuple[int, Message]]:
    """How often each message is sent by each part."""
    return Counter(
        (recorder.windows[window].part, what.message) for window, _, what in recorder.events if isinstance(what, Sent)
    )


def _shape(spec: TensorSpec) -> torch.Size:
    assert spec.shape is not None, "a plan is for microbatches of one length"
    return spec.shape


def _microbatch(model: Any, recorder: Recorder, z: Sizes, splits: bool) -> dict[int, int]:
    """Forward, loss and backward; what the weights' half needs."""
    queue = _Queue(recorder) if splits else None
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
            queue.compute()
    return put_off


class _Queue(WeightGradStore):
    """Products that are put off, and the windows that they belong to."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._windows = recorder, list[int]()

    def put(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        super().put(weight, compute)
        self._windows.append(self._recorder.at)

    def compute(self) -> None:
        """All of them, each in its window."""
        products = self.take()[::-1]
        for window in self._windows:
            self._recorder.put_off_in = window
            compute_wgrads([products.pop()])


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
    """For each layer of a model the number of the first one of its kind, whatever is recomputed."""
    config = config.replace(recompute_granularity=None)
    key = config, _name_of(spec)
    if key not in _KINDS:
        found = dict[tuple[Any, ...], int]()
        with torch.device("meta"):
            model = build_stage(config, Mesh.serial(), spec, pre_process=False, post_process=False)
        _KINDS[key] = tuple(found.setdefault(kind_of(layer), n) for n, layer in model.layers.items())
    return _KINDS[key]


def one_of_each(config: TransformerConfig, mesh: Mesh, spec: ModuleSpec | None = None) -> Any:
    """The model with one layer of each kind as a single stage, shapes without memory."""
    with torch.device("meta"):
        return build_stage(config, mesh, spec, layer_numbers=sorted(set(kinds_of(config, spec))))


Products = list[tuple[int, str, float]]
_PRODUCTS: dict[tuple[TransformerConfig, int, bool, int], Products] = {}


def forward_products(
    config: TransformerConfig, s: int, causal: bool = True, spec: ModuleSpec | None = None
) -> Products:
    """What one sequence of s tokens multiplies in a forward pass of the whole model in one process.

    Only shapes are wanted, and no memory: the layers run on torch's `meta` device.

    Args:
        causal: attention counts the pairs that its mask shows; else the whole square of queries and keys.

    Returns:
        How often, the name of the module, and FLOPs.
    """
    key = config, s, causal, _name_of(spec)
    if key not in _PRODUCTS:
        _PRODUCTS[key] = _products(config, s, causal, spec)
    return _PRODUCTS[key]


def _products(config: TransformerConfig, s: int, causal: bool, spec: ModuleSpec | None) -> Products:
    kinds, mesh = kinds_of(config, spec), Mesh.serial(device="meta")
    with counting_attention(causal), async_ops.alone(FakeTransport()), torch.device("meta"):
        model = one_of_each(config, mesh, spec).to("meta")
        recorder = Recorder([[layer] for layer in model.layers.values()], _names(model))
        ids = torch.zeros(1, s, dtype=torch.int64)
        with recording(recorder), StepHooks(model, mesh).passes(1.0):
            model(ids, None, ids)
    times = {part: kinds.count(number) for part, number in enumerate(model.layers, 1)}
    found = ((recorder.windows[event.window], event.what) for event in recorder.events)
    return [(times.get(w.part, 1), w.name, o.flops) for w, o in found if isinstance(o, Operation) and o.flops]


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
        """What a pass of a microbatch sends, and how often."""
        events = (event for part in self._at for event in self._run.of_part(part))
        return Counter(e.what.message for e in events if isinstance(e.what, Sent) and (e.phase != FORWARD) == backward)

    def messages_once(self) -> Counter[Message]:
        """What only the first microbatch of a step sends besides, and how often."""
        found = Counter[Message]()
        for (part, message), count in self._run.once.items():
            found[message] += count * self._at.count(part)
        return found


def _groups(model: Any) -> Iterator[tuple[list[nn.Module], bool]]:
    """Layers that are recomputed together, and every other layer by itself."""
    for group, again in model.layer_groups():
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
