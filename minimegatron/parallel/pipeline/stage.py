"""A pipeline stage that keeps an autograd graph for each microbatch.

    forward    y = f(mb, x), x leaves                keep x and the graph of y
    backward   the graph of y, with dy -> x.grad     release both
    weights    the wgrad that linear layers have put into a store (layers/wgrad)

x and y are named tensors, one or more (`parallel/pipeline/execution`). Of y only the edge of the graph is kept: the
tensor itself has gone to the next stage, and this rank does not read it again. (Megatron-LM empties it for the same
reason: `deallocate_output_tensor`.)

Data parallelism may start to sum a bucket when the bucket has the last gradient of the step. In a pipeline that
follows from the list: a parameter's last gradient comes in the last B or W of a chunk that it belongs to
(`last_gradients`). A tied matrix belongs to two chunks of a V-shaped placement, and is complete after the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from minimegatron import trace
from minimegatron.layers.wgrad import DeferredWgrad, WeightGradStore, compute_wgrads, deferring_wgrad
from minimegatron.parallel.pipeline.actions import Action, Schedule
from minimegatron.parallel.pipeline.execution import ONE_TENSOR, Specs, Tensors

if TYPE_CHECKING:
    from minimegatron.parallel.data.data_parallel import DataParallel

Forward = Callable[[int, Tensors | None], Tensors | torch.Tensor]


class ModuleStage:
    """The stage that computes `forward(microbatch, x)`.

    Args:
        forward: (microbatch, tensors of the previous stage) -> tensors for the next stage, or on the last stage the
            scaled loss of the microbatch.
        module: the module that `forward` runs; its linear layers defer wgrad where the schedule splits.
        schedule, rank, chunk: the schedule, and the stage's place in it.
        ddp: the data-parallel wrapper, which is told which gradients are complete.
        last: (kind, microbatch) -> parameters whose last gradient of the step comes in this action of this chunk.
        inputs, outputs: see `execution.Stage`.

    Attributes:
        live_bytes: bytes that autograd has saved for microbatches under way; counted while a trace is recorded.
    """

    def __init__(
        self,
        forward: Forward,
        module: nn.Module,
        schedule: Schedule,
        rank: int = 0,
        chunk: int = 0,
        ddp: DataParallel | None = None,
        last: dict[tuple[str, int], frozenset[str]] | None = None,
        inputs: Specs = ONE_TENSOR,
        outputs: Specs = ONE_TENSOR,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._forward = forward
        self._module = module
        self._schedule = schedule
        self._ddp = ddp
        self._last = last or {}
        self._stage = schedule.stage_of(rank, chunk)
        row = schedule.actions[rank]
        splits = any(a.kind == "W" and a.chunk == chunk for a in row)
        self._store = WeightGradStore() if splits else None
        self._graphs: dict[int, tuple[Tensors | None, dict[str, torch.autograd.graph.GradientEdge]]] = {}
        self._deferred: dict[int, list[DeferredWgrad]] = {}
        self._bytes: dict[int, int] = {}

    @property
    def live_bytes(self) -> int:
        return sum(self._bytes.values())

    def forward(self, microbatch: int, x: Tensors | None) -> Tensors:
        """See `execution.Stage`."""
        if self._schedule.forward_only:
            return _named(self._forward(microbatch, x))
        if x is not None:
            x = {name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in x.items()}
        with self._counting(microbatch), deferring_wgrad(self._module, self._store):
            y = _named(self._forward(microbatch, x))
        # A first stage whose weights are all frozen has no graph, and nothing to do on the way back.
        edge = torch.autograd.graph.get_gradient_edge
        self._graphs[microbatch] = x, {name: edge(tensor) for name, tensor in y.items() if tensor.requires_grad}
        return {name: tensor.detach() for name, tensor in y.items()}

    def backward(self, microbatch: int, dy: Tensors | None) -> Tensors | None:
        """See `execution.Stage`."""
        x, y = self._graphs.pop(microbatch)
        split = self._schedule.is_split(microbatch, self._stage)
        with self._completing("B", microbatch):
            if y:
                grads = None if dy is None else [dy[name] for name in y]
                with deferring_wgrad(self._module, self._store):  # layers that are computed again defer as well
                    torch.autograd.backward(list(y.values()), grads)
            if self._store is not None:
                self._deferred[microbatch] = self._store.take()
                if not split:
                    compute_wgrads(self._deferred.pop(microbatch))
        if not split:
            self._bytes.pop(microbatch, None)
        return None if x is None else _gradients(x)

    def weights(self, microbatch: int) -> None:
        """See `execution.Stage`."""
        with self._completing("W", microbatch):
            compute_wgrads(self._deferred.pop(microbatch))
        self._bytes.pop(microbatch, None)

    @contextlib.contextmanager
    def _completing(self, kind: str, microbatch: int) -> Iterator[None]:
        """Around an action: gradients that the action completes may be reduced."""
        if self._ddp is None:
            yield
            return
        names = self._last.get((kind, microbatch), frozenset())
        if kind == "W" and names:  # those that are not deferred have been complete since the last B
            deferred = {self._ddp.name_of(p.weight) for p in self._deferred[microbatch]}
            self._ddp.ready(names - deferred)
        ends = kind == "W" or not self._schedule.is_split(microbatch, self._stage)
        one_pass = self._ddp.backward_pass(self._module) if ends else contextlib.nullcontext()
        with self._ddp.sync_only(names), one_pass:
            yield
        self._ddp.release_weights()

    @contextlib.contextmanager
    def _counting(self, microbatch: int) -> Iterator[None]:
        """Count the bytes that autograd saves, without the parameters, each storage once."""
        if not trace.recording():
            yield
            return
        weights = {p.untyped_storage().data_ptr() for p in self._module.parameters()}
        seen: dict[int, int] = {}

        def count(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            yield
        self._bytes[microbatch] = sum(seen.values())


def _named(y: Tensors | torch.Tensor) -> Tensors:
    return {"loss": y} if isinstance(y, torch.Tensor) else y


def _gradients(x: Tensors) -> Tensors | None:
    """Gradients of the tensors that have one, zero for those that the stage has not used; None if it has used none."""
    leaves = {name: tensor for name, tensor in x.items() if tensor.requires_grad}
    if all(tensor.grad is None for tensor in leaves.values()):
        return None
    return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}


def last_gradients(
    schedule: Schedule, rank: int, chunks: Sequence[nn.Module], ddp: DataParallel
) -> list[dict[tuple[str, int], frozenset[str]]]:
    """For each chunk of a rank: (kind, microbatch) of an action -> parameters whose last gradient it produces."""
    names = [{ddp.name_of(param) for param in chunk.parameters() if param.requires_grad} for chunk in chunks]
    left = set[str]().union(*names)
    last: list[dict[tuple[str, int], frozenset[str]]] = [{} for _ in chunks]
    row: tuple[Action, ...] = schedule.actions[rank]
    for action in reversed(row):
        ended = left & names[action.chunk]
        if action.kind != "F" and ended:
            last[action.chunk][action.kind, action.microbatch] = frozenset(ended)
            left -= ended
    return last
