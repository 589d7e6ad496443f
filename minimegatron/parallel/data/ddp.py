"""Data parallelism: the same weights everywhere, other samples, one sum.

The problem in a sentence: D replicas see different samples and must take the same step, without waiting for the
network any longer than they must.

Each replica adds its gradients into a flat buffer, cut into buckets (`parallel/data/buckets`,
`parallel/data/grad_buffer`). In the backward pass of the *last* microbatch of a step a bucket is summed over the
replicas as soon as its last gradient arrives, while the layers before it are still being computed:

    backward   |  layer 3  |  layer 2  |  layer 1  |  layer 0  |
    network                | bucket 0  |    bucket 1   |  bucket 2 |      only the last one is waited for

| `sharding`           | of gradients travels                | and of weights                    | a rank keeps 1/D of |
|----------------------|-------------------------------------|-----------------------------------|---------------------|
| `no_shard`           | all-reduce, last microbatch         | nothing                           | nothing             |
| `optim`              | reduce-scatter, last microbatch     | all-gather, after the step        | AdamW's state       |
| `optim_grads`        | reduce-scatter, every microbatch    | all-gather, after the step        | and gradients       |
| `optim_grads_params` | reduce-scatter, every microbatch    | all-gather, when a unit runs      | and weights         |

The names are Megatron's, after the stages 1, 2 and 3 of ZeRO. With a sharded optimizer the weights lie in buffers of
the gradients' layout (`parallel/data/param_buffer`) and each rank updates its `shards` of them; how they come together
again is in that file and in `parallel/data/gather_on_use`.

Where weights have the buffer's dtype, a linear layer's backward adds its dW to the buffer in the very product that
computes it (`layers/wgrad.py`; Megatron's `gradient_accumulation_fusion`): the gradient itself never exists, and one
pass over it is saved.

Every gradient enters through the sink of its parameter (`BufferSink`, which is `param.gradient_sink`): that of a
product as just said, any other when autograd has put it into `param.grad`, and one that a pipeline has put off when it
is computed.

Gradients are *summed*, never averaged here. A replica does not know how many tokens the others counted, so it cannot
know the divisor; the mean of per-rank means is a different number as soon as the counts differ. The one division, by
the global token count, is in `parallel/data/finalize.py`.

Experts have a buffer of their own, because other ranks hold copies of them: edp, which is what expert parallelism
leaves of tp x cp x dp. Tokens of the other ranks have reached an expert by then, and with them their gradients.

Li et al. 2020 (arXiv 2006.15704); Rajbhandari et al. 2020 (arXiv 1910.02054). Megatron-LM:
`megatron/core/distributed/distributed_data_parallel.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.parallel.data.buckets import DEFAULT_BUCKET_SIZE, bucket_layout
from minimegatron.parallel.data.buffer_sink import BufferSink
from minimegatron.parallel.data.data_parallel import DataParallel, Shard
from minimegatron.parallel.data.gather_on_use import GatherOnUse
from minimegatron.parallel.data.grad_buffer import Fleeting, GradBuffer, Replicated, Sharded
from minimegatron.parallel.data.param_buffer import ShardedParams, WholeParams
from minimegatron.parallel.data.units import Unit, leaves_of, units_of

KINDS: dict[str, type[Replicated] | type[Fleeting]] = {
    "no_shard": Replicated,
    "optim": Sharded,
    "optim_grads": Fleeting,
    "optim_grads_params": Fleeting,
}


class DistributedDataParallel(DataParallel):
    """Wrap a model so that its gradients are summed over the ranks that hold the same weights.

    Args:
        module: the model; every trainable parameter gets a place in a buffer of gradients, and as `main_grad` a view of
            it where the buffer lasts.
        mesh: gradients are summed over `mesh.dp_cp`, those of experts over `mesh.edp`; shards are dealt out
            among `mesh.dp_shard`, `mesh.edp_shard`.
        bucket_size: elements of a bucket; default max(40e6, 1e6 * dp_cp). There is one bucket where none travels
            before the last gradient is there.
        overlap: reduce buckets while the backward pass runs.
        grad_dtype: of the buffer.
        sharding: what replicas share out: see the module's table.
        overlap_param_gather: wait for updated weights when they are used, not after the step.

    Attributes:
        buffer: of all parameters but experts, and but those of another dtype where weights are sharded.
        grad_buffers: all, those of experts last.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        bucket_size: int | None = None,
        overlap: bool = False,
        grad_dtype: torch.dtype = torch.float32,
        sharding: str = "no_shard",
        overlap_param_gather: bool = False,
    ) -> None:
        super().__init__(module, mesh)
        self.overlap = overlap
        self.sharding, self._gathers_late = sharding, overlap_param_gather
        self._sync: Collection[str] | None = None  # parameters whose gradient is now complete; None means all
        by_unit = sharding == "optim_grads_params"
        in_time = (overlap or overlap_param_gather or sharding == "optim_grads") and not by_unit
        self._bucket_size = (bucket_size or max(DEFAULT_BUCKET_SIZE, 1_000_000 * mesh.dp_cp.size)) if in_time else None
        trainable = [(n, p) for n, p in logical_parameters(module) if p.requires_grad]
        self.grad_buffers: list[GradBuffer] = []
        self._whole_params: list[WholeParams] = []
        self._sharded_params: list[list[ShardedParams]] = []
        units = units_of(module) if by_unit else []
        self._unit_of = {param: number for number, unit in enumerate(units) for param in unit.params}
        dense = [(n, p) for n, p in trainable if layout_of(p).experts is None]
        experts = [(n, p) for n, p in trainable if layout_of(p).experts is not None]
        self._add_buffers(dense, mesh.dp_shard, mesh.dp_instances, grad_dtype)
        if experts:
            self._add_buffers(experts, mesh.edp_shard, mesh.edp_instances, grad_dtype)
        self.buffer = self.grad_buffers[0]
        self._names = {param: name for name, param in trainable}
        self._buffer_of = {name: buffer for buffer in self.grad_buffers for name in buffer.params}
        for name, param in trainable:
            sink = BufferSink(self, name, self._buffer_of[name].bucket_of[name], param.dtype == grad_dtype)
            param.gradient_sink = sink  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(sink.collect)
        self._on_use: GatherOnUse | None = None
        if by_unit:
            self._gather_on_use(units)
        elif overlap_param_gather:
            self._wait_before_use()

    def _add_buffers(
        self, params: list[tuple[str, nn.Parameter]], axis: Axis, instances: Axis, dtype: torch.dtype
    ) -> None:
        """Buffers for parameters whose replicas are on these axes; where weights are sharded one for each dtype."""
        sharded = self.sharding != "no_shard"
        kinds = dict.fromkeys(p.dtype if sharded else None for _, p in params) or {None: None}
        for of in kinds:
            members = [(n, p) for n, p in params if of is None or p.dtype == of]
            groups = [(self._unit_of.get(p), layout_of(p).copies and n) for n, p in members] if sharded else None
            numels = [p.numel() for _, p in members]
            layout = bucket_layout(numels, self._bucket_size, axis.size if sharded else None, groups)
            if self._unit_of:
                self._sharded_params.append([ShardedParams(members, layout, b, axis) for b in layout.buckets])
            elif sharded:
                self._whole_params.append(WholeParams(members, layout, axis))
            kind = KINDS[self.sharding]
            self.grad_buffers.append(GradBuffer(members, layout, kind, axis, instances, dtype, self.overlap))

    def _wait_before_use(self) -> None:
        """Before a unit of the model runs, its weights must have come."""
        buffers = {name: buffer for buffer in self._whole_params for name in buffer.bucket_of}
        for unit in units_of(self.module):
            for part, params in leaves_of(unit):
                names = [self._names[p] for p in params if p in self._names]
                needed = dict.fromkeys((buffers[name], buffers[name].bucket_of[name]) for name in names)
                part.register_forward_pre_hook(_Arrival(list(needed)))

    def _gather_on_use(self, units: list[Unit]) -> None:
        """The units of the model gather their weights."""
        bucket_of: dict[nn.Parameter, ShardedParams] = {}
        for buffer, sharded in zip(self.grad_buffers, self._sharded_params, strict=True):
            params = list(buffer.params.values())
            for span, bucket in zip(buffer.layout.buckets, sharded, strict=True):
                bucket_of |= {params[member]: bucket for member in span.members}
        parts = []
        for unit in units:
            used = dict.fromkeys(bucket_of[p] for p in (*unit.params, *unit.borrowed) if p in bucket_of)
            parts.append((unit, list(used), [self._names[p] for p in unit.params if p in bucket_of]))
        self._on_use = GatherOnUse(parts, keep_outside=self.mesh.pp.size == 1)

    def complete(self, name: str) -> None:
        """This gradient of a microbatch is there; the last one of a step may travel."""
        if self._sync is None or name in self._sync or self._buffer_of[name].fleeting:
            self.ready((name,))

    def ready(self, names: Iterable[str]) -> None:
        """These gradients are complete: with `overlap` their buckets may travel, and fleeting ones must."""
        for name in names:
            buffer = self._buffer_of[name]
            if self.overlap or buffer.fleeting:
                buffer.ready(name)
            if self._on_use is not None:
                self._on_use.complete(name)

    def name_of(self, param: torch.Tensor) -> str:
        """The logical name of one of the trainable parameters."""
        return self._names[param]  # type: ignore[index]

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        """Only accumulate, but for these parameters, whose last gradient of the step is computed in the block."""
        self._sync, before = names, self._sync
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def backward_pass(self, module: nn.Module | None = None) -> Iterator[None]:
        """Around what produces gradients of one microbatch, of parameters of `module` (default: of all)."""
        fleeting = any(buffer.fleeting for buffer in self.grad_buffers)
        if fleeting:
            names = {self._names[p] for p in (module or self.module).parameters() if p in self._names}
            for buffer in self.grad_buffers:
                buffer.begin_pass(names)
        yield
        if fleeting:
            for buffer in self.grad_buffers:
                buffer.end_pass()
        self.release_weights()

    def release_weights(self) -> None:
        """A backward pass has ended: let go of weights that were gathered for it."""
        if self._on_use is not None:
            self._on_use.end_pass()

    def finish_grad_sync(self) -> None:
        """After this every `main_grad` is the sum over its axis. Call once a step, after the last backward pass."""
        for weights in self._whole_params:
            weights.finish()  # those that this step has not used: they are about to change
        for buffer in self.grad_buffers:
            buffer.finish()

    def zero_grad_buffer(self) -> None:
        """Forget the gradients; call at the start of every step."""
        for buffer in self.grad_buffers:
            buffer.zero()

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        for buffer in self.grad_buffers:
            buffer.divide(divisor)

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply every gradient."""
        for buffer in self.grad_buffers:
            buffer.multiply(factor)

    def shards(self) -> dict[str, Shard]:
        """What this rank updates, by the parameter's logical name; a parameter may have no part here."""
        if self.sharding == "no_shard":
            return {n: Shard(None, self._buffer_of[n].bucket_of[n].grad(n), p.detach()) for n, p in self.params.items()}
        found: dict[str, Shard] = {}
        for number, buffer in enumerate(self.grad_buffers):
            names = list(buffer.params)
            for piece in buffer.layout.pieces(buffer.axis.rank):
                grad = buffer.buckets[piece.bucket].owned[piece.of_shard.slice]
                data = self._weights(number, piece.bucket)[piece.of_shard.slice]
                found[names[piece.param]] = Shard(piece.of_param.slice, grad, data)
        return found

    def _weights(self, buffer: int, bucket: int) -> torch.Tensor:
        """This rank's shard of the weights of a bucket."""
        if self._sharded_params:
            return self._sharded_params[buffer][bucket].shard
        return self._whole_params[buffer].shard(bucket)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Every gradient whole, from the shards of all replicas (a check wants them; training does not)."""
        found: dict[str, torch.Tensor] = {}
        for buffer in self.grad_buffers:
            for bucket in buffer.buckets:
                whole = bucket.owned if self.sharding == "no_shard" else all_gather(bucket.owned, buffer.axis)
                found |= {name: bucket.view(whole, name) for name in bucket.members}
        return {name: found[name] for name in self.params}

    def held(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {"parameters": [], "gradients": [], "communication": []}
        found["gradients"] += [buffer.data for buffer in self.grad_buffers]
        found["communication"] += [whole for one in self._sharded_params for bucket in one for whole in bucket.memory]
        here = {whole.untyped_storage()._cdata for whole in found["communication"]}
        found["parameters"] += [bucket.shard for one in self._sharded_params for bucket in one]
        found["parameters"] += [p for p in self.module.parameters() if p.untyped_storage()._cdata not in here]
        return found

    def start_param_gather(self) -> None:
        """The shards of the weights are new: put them together again, or begin to."""
        self.release_weights()  # what is here is old
        for buffer in self._whole_params:
            buffer.start()
            if not self._gathers_late:
                buffer.finish()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """In the block every weight is whole: for what reads weights outside of a forward pass."""
        for buffer in self._whole_params:
            buffer.finish()
        with self._on_use.whole() if self._on_use is not None else contextlib.nullcontext():
            yield


class _Arrival:
    """A forward pre-hook that waits for weights."""

    def __init__(self, needed: list[tuple[WholeParams, int]]) -> None:
        self._needed = needed

    def __call__(self, module: nn.Module, args: Any) -> None:
        for buffer, bucket in self._needed:
            buffer.require(bucket)
