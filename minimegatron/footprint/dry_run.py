"""A stage run once without memory: the bytes that it keeps, its operations and its messages, whatever its layers are.

The problem in a sentence: a formula knows the layers that its author knew, and a plan is wanted for a layer that
somebody wrote yesterday.

So the layers themselves are run. Parameters and inputs are torch's fake tensors (`FakeTensorMode`): shapes, dtypes and
storages without memory. Axes have the sizes of the planned layout and no process group: a transport that completes
every message at once replaces the backend, so one process stands for any rank of thousands. Forward, loss and backward
run as in training, and a `Recorder` (`footprint/recorder`) records what happens.

The windows of a layer make a `Tape` of `Step`s: the bytes that each keeps, and its workspace, the bytes that are alive
only while it runs:

    bytes alive in forward     kept so far + what this step keeps + its workspace
    bytes alive in backward    kept up to and with this step      + its workspace

A large stage is not run whole: `footprint/kinds` puts it together from runs of one layer of each kind.

Fake tensors have no values. Where the dispatcher of experts reads loads, it gets the loads that it expects
(`layers.recompute.to_host`); a layer that reads any other value raises `Unpredicted`, and a plan shows its text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.transport import FakeTransport
from minimegatron.config import TransformerConfig
from minimegatron.footprint.events import BACKWARD, FORWARD, WEIGHTS, Event, Message, Sent, Unpredicted, Window
from minimegatron.footprint.gpu import computing_on_gpu
from minimegatron.footprint.recorder import Recorder, recording
from minimegatron.layers.moe.dispatch import LOADS, Loads
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.layers.wgrad import WeightGradStore, compute_wgrads, deferring_wgrad
from minimegatron.models.chunks import build_stage
from minimegatron.models.spec import ModuleSpec
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.pipeline.execution import TensorSpec


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a layer, in the order of the forward pass.

    Attributes:
        name: its name.
        keeps: bytes that it keeps for the backward pass.
        forward, backward: bytes of workspace in either pass: alive only while it runs.
        puts_off: bytes that stay until wgrad is computed, in a schedule that defers it.
    """

    name: str
    keeps: int = 0
    forward: int = 0
    backward: int = 0
    puts_off: int = 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """The memory while one step runs.

    Attributes:
        kept: bytes kept for backward passes.
        workspace: bytes of workspace.
        where: the pass and the step, e.g. `backward mlp.linear_fc1`.
    """

    kept: int
    workspace: int
    where: str

    @property
    def total(self) -> int:
        return self.kept + self.workspace


class Tape(tuple[Step, ...]):
    """The steps of a layer, in the order of the forward pass."""

    @property
    def kept(self) -> int:
        """Bytes that all steps keep for the backward pass."""
        return sum(step.keeps for step in self)

    @property
    def put_off(self) -> int:
        """Bytes that stay after the backward pass until wgrad is computed."""
        return sum(step.puts_off for step in self)

    def highest(self, backward: bool, splits: bool = False) -> Moment:
        """The fullest moment of the forward or of the backward pass.

        Args:
            backward: which of the two passes.
            splits: wgrad is deferred.
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
        s, b: tokens of a sample that are on this rank, samples.
        adds_products: wgrad is added to the gradient buffer as it is computed; False where the buffer has another
            dtype,
            so that wgrad is a tensor of its own first.
        documents: samples consist of documents that do not attend to each other.
        device: type of the device.
        crowded: the experts of this rank get all tokens that they can, not an equal share.
        spec: the spec of each layer; default the model's.
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


@dataclasses.dataclass(frozen=True)
class Run:
    """A stage that has been run.

    Attributes:
        windows: windows of the forward pass, in order.
        events: operations and messages of all phases, in order.
        once: (part, message) -> how often only the first microbatch of a step sends it.
        lasting: bytes of each part that stay until the step ends; first those before all parts, last those after.
        put_off: {number of a window: bytes that stay until its wgrad is computed}.
        expects: loads of experts were expected ones, which a real run may exceed.
    """

    windows: list[Window]
    events: list[Event]
    once: Counter[tuple[int, Message]]
    lasting: list[int]
    put_off: dict[int, int]
    expects: bool = False

    @functools.cached_property
    def tapes(self) -> list[Tape]:
        """One tape for what runs before the first part, one for each part, one for what runs after the last."""
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
        """The events of a part; parts are numbered as the tapes are."""
        return self._by_part[part]

    @functools.cached_property
    def _by_part(self) -> list[list[Event]]:
        found: list[list[Event]] = [[] for _ in self.lasting]
        for event in self.events:
            found[self.windows[event.window].part].append(event)
        return found

    @property
    def weights(self) -> int:
        """Bytes of the fullest moment of wgrad, without those that were deferred for it."""
        most = max((window.most.get(WEIGHTS, 0) for window in self.windows), default=0)
        return max(0, most - sum(self.put_off.values()))


def run_stage(z: Sizes, layers: Sequence[Sequence[int]], first: bool, last: bool, splits: bool = False) -> Run:
    """Run a microbatch through a stage, forward and backward.

    Args:
        z: the model, the place of its rank and the sizes.
        layers: global numbers of the layers of each part.
        first, last: whether the embedding is here; whether the loss is.
        splits: wgrad is deferred.

    Raises:
        Unpredicted: a layer reads the value of a tensor.
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
        recorder = Recorder(parts, module_names(model))
        recorder.ignored |= before
        recorder.ignore(*model.parameters(), *model.buffers(), *(buffer.data for buffer in ddp.grad_buffers))
        put_off = _microbatch(model, recorder, z, splits)
        first, left = first or _sent(recorder), recorder.left_over()
        if not left:
            return Run(recorder.windows, recorder.events, first - _sent(recorder), lasting, put_off)
        for key, (part, nbytes) in left.items():  # what the first microbatch has made, the next one finds
            lasting[part] += nbytes
            before.add(key)


def module_names(model: Any) -> dict[nn.Module, str]:
    """Names of the modules; in a layer they begin with the layer."""
    names = {module: name for name, module in model.named_modules()}
    for number, layer in model.layers.items():
        names |= {module: name or f"layer {number}" for name, module in layer.named_modules()}
    return names


def _sent(recorder: Recorder) -> Counter[tuple[int, Message]]:
    """How often each part sends each message."""
    return Counter(
        (recorder.windows[window].part, what.message) for window, _, what in recorder.events if isinstance(what, Sent)
    )


def _shape(spec: TensorSpec) -> torch.Size:
    assert spec.shape is not None, "a plan is for microbatches of one length"
    return spec.shape


def _microbatch(model: Any, recorder: Recorder, z: Sizes, splits: bool) -> dict[int, int]:
    """Forward, loss and backward. Returns {number of a window: bytes that stay until its wgrad is computed}."""
    queue = _Queue(recorder) if splits else None
    inputs, outputs = model.stage_specs(z.b, z.s)
    with recording(recorder):
        batch = {
            "tokens": torch.zeros(z.b, z.s, dtype=torch.int64),
            "labels": torch.zeros(z.b, z.s, dtype=torch.int64),
            "loss_mask": torch.ones(z.b, z.s),
        }
        batch |= model.blank_inputs(z.b, z.s)
        if z.documents:
            batch["document_ids"] = torch.zeros(z.b, z.s * z.mesh.cp.size, dtype=torch.int64)
        x = {n: torch.zeros(_shape(t), dtype=t.dtype, requires_grad=t.has_gradient) for n, t in inputs.items()} or None
        with deferring_wgrad(model, queue):
            more = {name: tensor for name, tensor in batch.items() if name not in ("tokens", "labels", "loss_mask")}
            output = model(batch["tokens"], labels=batch["labels"], **more, inputs=x)
            ys = [(output * batch["loss_mask"]).sum()] if model.post_process else [output[n] for n in outputs]
        edges = [torch.autograd.graph.get_gradient_edge(y) for y in ys if y.requires_grad]
        del output, ys
        recorder.forward_ended()
        dys = [torch.zeros(_shape(t), dtype=t.dtype) for t in outputs.values() if t.has_gradient] or None
        with deferring_wgrad(model, queue):
            torch.autograd.backward(edges, dys)
        del edges, dys, x, batch, more
        put_off = recorder.backward_ended()
        if queue is not None:
            queue.compute()
    return put_off


class _Queue(WeightGradStore):
    """A store of deferred wgrads that remembers the window of each."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._windows = recorder, list[int]()

    def put(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        super().put(weight, compute)
        self._windows.append(self._recorder.at)

    def compute(self) -> None:
        """Compute all wgrads, each in its window."""
        products = self.take()[::-1]
        for window in self._windows:
            self._recorder.put_off_in = window
            compute_wgrads([products.pop()])
