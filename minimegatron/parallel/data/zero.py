"""Sharding strategies of data parallelism: what is sharded over the replicas. One class for each stage of ZeRO.

| class     | strategy             | gradients are reduced by       | weights are gathered     | a rank keeps 1/D of |
|-----------|----------------------|--------------------------------|--------------------------|---------------------|
| `NoShard` | `no_shard`           | all-reduce, last microbatch    | never                    | nothing             |
| `Zero1`   | `optim`              | reduce-scatter, last one       | after a step             | AdamW's state       |
| `Zero2`   | `optim_grads`        | reduce-scatter, every one      | after a step             | and gradients       |
| `Zero3`   | `optim_grads_params` | reduce-scatter, every one      | on use                   | and weights         |

Each class has only what differs from the one before it: where gradients and weights are stored (`add_params`,
`shards`), what happens when a gradient is complete (`complete`, `begin_pass`, `end_pass`), when weights are gathered
(`start_param_gather`, `register_hooks`, `whole_weights`). The buckets of gradients are in `parallel/data/grad_buffer`,
the buffers of weights in `parallel/data/param_buffer`.

Rajbhandari et al. 2020 (arXiv 1910.02054). The names of the strategies are Megatron's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.lora import packed_tensors
from minimegatron.layers.param import layout_of
from minimegatron.parallel.data.buckets import BufferLayout, bucket_layout
from minimegatron.parallel.data.data_parallel import Shard
from minimegatron.parallel.data.grad_buffer import GradBuffer, ShardedBucket, TemporaryBucket, TemporaryGradBuffer
from minimegatron.parallel.data.param_buffer import GatherOnUse, ShardedParams, WholeParams
from minimegatron.parallel.data.units import leaves_of, units_of

Params = Sequence[tuple[str, nn.Parameter]]  # by logical name, in the order of registration


class NoShard:
    """Plain data parallelism: every rank has all gradients and all weights, and updates all of them.

    Args:
        module: the model.
        mesh: its layout.
        bucket_size: elements of a bucket, if there is more than one.
        overlap: reduce buckets while the backward pass runs.
        grad_dtype: dtype of the gradient buffers.
        overlap_param_gather: wait for updated weights when they are used, not after the step.

    Attributes:
        grad_buffers: one for each call of `add_params`, in that order.
        buffer_of: logical name of a parameter -> its buffer.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        bucket_size: int,
        overlap: bool,
        grad_dtype: torch.dtype,
        overlap_param_gather: bool,
    ) -> None:
        self.module, self.mesh, self.overlap, self.grad_dtype = module, mesh, overlap, grad_dtype
        self.overlap_param_gather = overlap_param_gather
        self.bucket_size = bucket_size if self._uses_buckets() else None
        self.grad_buffers: list[GradBuffer] = []
        self.buffer_of: dict[str, GradBuffer] = {}

    def _uses_buckets(self) -> bool:
        """Whether anything is sent before the last gradient is complete; else one bucket suffices."""
        return self.overlap or self.overlap_param_gather

    def add_params(self, params: Params, axis: Axis, instances: Axis) -> None:
        """Lay out parameters in a buffer.

        Args:
            params: parameters whose gradients are summed over the same ranks.
            axis: these ranks; with instances those of one instance, over which shards are divided.
            instances: ranks that own the same shards.
        """
        if params:
            layout = bucket_layout([p.numel() for _, p in params], self.bucket_size)
            self._add_buffer(GradBuffer(params, layout, axis, instances, self.grad_dtype, self.overlap))

    def _add_buffer(self, buffer: GradBuffer) -> None:
        self.grad_buffers.append(buffer)
        self.buffer_of |= dict.fromkeys(buffer.params, buffer)

    def register_hooks(self) -> None:
        """Register the hooks that gather weights, once all parameters have been added."""

    def shards(self) -> dict[str, Shard]:
        """The parts of parameters that this rank updates (`DataParallel.shards`)."""
        buckets = {name: bucket for buffer in self.grad_buffers for name, bucket in buffer.bucket_of.items()}
        return {
            name: Shard(None, buckets[name].view(buckets[name].owned, name), param.detach())
            for buffer in self.grad_buffers
            for name, param in buffer.params.items()
        }

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors} that last from step to step."""
        gradients = [buffer.data for buffer in self.grad_buffers]
        parameters = [*self.module.parameters(), *packed_tensors(self.module)]
        return {"parameters": parameters, "gradients": gradients, "communication": []}

    # --------------------------------------------------------------------------------------------- gradients

    def begin_pass(self, module: nn.Module) -> None:
        """A backward pass begins, through `module`."""

    def complete(self, name: str, last: bool) -> None:
        """A parameter's gradient of this microbatch is complete; `last` if it is the last of the step."""
        if last and self.overlap:
            self.buffer_of[name].ready(name)

    def end_pass(self) -> None:
        """The backward pass has ended."""

    def finish(self) -> None:
        """Finish the reductions of the step: after this the gradients are sums over the ranks."""
        for buffer in self.grad_buffers:
            buffer.finish()

    # --------------------------------------------------------------------------------------------- weights

    def start_param_gather(self) -> None:
        """Start to gather weights: the optimizer has updated this rank's shards."""

    def release_weights(self) -> None:
        """Free weights that were gathered for a backward pass."""

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """In the block every weight is whole."""
        yield


class Zero1(NoShard):
    """Each rank updates its shard of every bucket, and the whole weights are gathered after the step.

    A rank needs the summed gradients and AdamW's state of its shards alone. A shard may begin and end within a
    parameter. Weights are stored in buffers of the gradients' layout, each of one dtype.

    Attributes:
        weights: for each gradient buffer this rank's shards of the weights, by bucket.
    """

    grad_buffer: type[GradBuffer] = GradBuffer
    bucket: type[ShardedBucket] = ShardedBucket

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights: list[list[torch.Tensor]] = []
        self._params: list[WholeParams] = []

    def add_params(self, params: Params, axis: Axis, instances: Axis) -> None:
        for dtype in dict.fromkeys(p.dtype for _, p in params):
            members = [(n, p) for n, p in params if p.dtype == dtype]
            groups = [self._bucket_group(n, p) for n, p in members]
            layout = bucket_layout([p.numel() for _, p in members], self.bucket_size, axis.size, groups)
            self._add_buffer(
                self.grad_buffer(members, layout, axis, instances, self.grad_dtype, self.overlap, self.bucket)
            )
            self.weights.append(self._add_weights(members, layout, axis))

    def _bucket_group(self, name: str, param: nn.Parameter) -> Any:
        """A key; parameters with different keys share no bucket: a weight with copies on several stages is alone in
        one."""
        return layout_of(param).copies and name

    def _add_weights(self, params: Params, layout: BufferLayout, axis: Axis) -> list[torch.Tensor]:
        """Put the weights into a buffer; returns this rank's shards of its buckets."""
        self._params.append(WholeParams(params, layout, axis))
        return [self._params[-1].shard(bucket) for bucket in range(len(layout.buckets))]

    def register_hooks(self) -> None:
        """With `overlap_param_gather`: before a part of the model runs, wait for its weights."""
        if not self.overlap_param_gather:
            return
        names = {param: name for buffer in self.grad_buffers for name, param in buffer.params.items()}
        places = {name: (weights, bucket) for weights in self._params for name, bucket in weights.bucket_of.items()}
        for unit in units_of(self.module):
            for part, params in leaves_of(unit):
                needed = dict.fromkeys(places[names[p]] for p in params if p in names)
                part.register_forward_pre_hook(partial(_wait_for, list(needed)))

    def shards(self) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        for buffer, weights in zip(self.grad_buffers, self.weights, strict=True):
            names = list(buffer.params)
            for piece in buffer.layout.pieces(buffer.axis.rank):
                grad = buffer.buckets[piece.bucket].owned[piece.of_shard.slice]
                data = weights[piece.bucket][piece.of_shard.slice]
                shards[names[piece.param]] = Shard(piece.of_param.slice, grad, data)
        return shards

    def finish(self) -> None:
        for weights in self._params:
            weights.finish()  # those that this step has not used: they are about to change
        super().finish()

    def start_param_gather(self) -> None:
        for weights in self._params:
            weights.start()
            if not self.overlap_param_gather:
                weights.finish()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        for weights in self._params:
            weights.finish()
        yield


class Zero2(Zero1):
    """Only this rank's shards of the gradients are kept: every backward pass reduces its buckets and frees them."""

    grad_buffer = TemporaryGradBuffer
    bucket = TemporaryBucket

    def _uses_buckets(self) -> bool:
        return True

    def begin_pass(self, module: nn.Module) -> None:
        params = set(module.parameters())
        for buffer in self.grad_buffers:
            buffer.begin_pass({name for name, param in buffer.params.items() if param in params})

    def complete(self, name: str, last: bool) -> None:
        self.buffer_of[name].ready(name)

    def end_pass(self) -> None:
        for buffer in self.grad_buffers:
            buffer.end_pass()


class Zero3(Zero2):
    """Only this rank's shards of the weights are kept: a unit's weights are gathered when it runs, and freed after it.

    A bucket has parameters of one unit, so a gather brings no weights of another unit.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, *args: Any) -> None:
        super().__init__(module, mesh, *args)
        self._units = units_of(module)
        self._unit_of = {param: number for number, unit in enumerate(self._units) for param in unit.params}
        self._bucket_of: dict[nn.Parameter, ShardedParams] = {}

    def _uses_buckets(self) -> bool:
        return False  # `_bucket_group` cuts them

    def _bucket_group(self, name: str, param: nn.Parameter) -> Any:
        return self._unit_of[param], super()._bucket_group(name, param)

    def _add_weights(self, params: Params, layout: BufferLayout, axis: Axis) -> list[torch.Tensor]:
        buckets = [ShardedParams(params, layout, bucket, axis) for bucket in layout.buckets]
        for span, bucket in zip(layout.buckets, buckets, strict=True):
            self._bucket_of |= {params[member][1]: bucket for member in span.members}
        return [bucket.shard for bucket in buckets]

    def register_hooks(self) -> None:
        """Before a unit runs its weights are gathered, after it they are freed."""
        names = {param: name for buffer in self.grad_buffers for name, param in buffer.params.items()}
        units = []
        for unit in self._units:
            used = dict.fromkeys(self._bucket_of[p] for p in (*unit.params, *unit.borrowed) if p in names)
            units.append((unit, list(used), [names[p] for p in unit.params if p in names]))
        self.gathers = GatherOnUse(units, keep_outside=self.mesh.pp.size == 1)

    def held(self) -> dict[str, list[torch.Tensor]]:
        buckets = list(dict.fromkeys(self._bucket_of.values()))
        whole = {bucket.whole.untyped_storage()._cdata for bucket in buckets}
        frozen = [p for p in self.module.parameters() if p.untyped_storage()._cdata not in whole]
        return super().held() | {
            "parameters": [*(bucket.shard for bucket in buckets), *frozen, *packed_tensors(self.module)],
            "communication": [bucket.whole for bucket in buckets],
        }

    def complete(self, name: str, last: bool) -> None:
        super().complete(name, last)
        self.gathers.complete(name)

    def end_pass(self) -> None:
        super().end_pass()
        self.release_weights()

    def finish(self) -> None:
        super().finish()
        for bucket in dict.fromkeys(self._bucket_of.values()):
            bucket.settle()

    def start_param_gather(self) -> None:
        self.release_weights()  # what is gathered is old

    def release_weights(self) -> None:
        self.gathers.end_pass()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        with self.gathers.whole():
            yield


def _wait_for(buckets: list[tuple[WholeParams, int]], module: nn.Module, args: Any) -> None:
    """A forward pre-hook that waits for weights."""
    for weights, bucket in buckets:
        weights.require(bucket)


STRATEGIES: dict[str, type[NoShard]] = {
    "no_shard": NoShard,
    "optim": Zero1,
    "optim_grads": Zero2,
    "optim_grads_params": Zero3,
}
