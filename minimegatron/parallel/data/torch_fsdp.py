"""ZeRO-3 by torch's own FSDP2, under the same training step.

The problem in a sentence: `parallel/data/zero.Zero3` is written to be read, torch's FSDP2 is tested and tuned by many
people; a run should be able to choose, and both must take the same steps.

`fully_shard` is called on the units of `parallel/data/units`, then on each stage for parameters outside of lists. Every
parameter becomes a `DTensor` that is cut along dim 0 over the replicas: rank r holds rows of it.

| here (`optim_grads_params`)          | torch's FSDP2                                                      |
|--------------------------------------|--------------------------------------------------------------------|
| a bucket is cut into D equal parts   | every parameter is, along dim 0; the last rank may hold less       |
| bf16 shards, and fp32 main shards    | fp32 shards (`sharded` parameters), cast to bf16 when gathered     |
| sums over ranks in fp32              | `MixedPrecisionPolicy(reduce_dtype=torch.float32)`                 |
| gradients are summed                 | averaged by default; `set_gradient_divide_factor(1.0)`             |
| experts: `edp`                       | their modules are sharded first, over `edp`                        |
| instances: an all-reduce of shards   | a mesh of (instances, shards); all-reduce after the last microbatch|

Zero-bubble schedules are refused: FSDP2 reduces gradients when autograd has finished, and frees the weight to which a
deferred wgrad would be added.

Zhao et al. 2023 (arXiv 2304.11277). Megatron-LM: `megatron/core/distributed/torch_fully_sharded_data_parallel.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # what `set_custom_...` takes
from torch.distributed.tensor import DTensor

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather_start, reduce_scatter_start
from minimegatron.comm.gloo import is_gloo
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of
from minimegatron.parallel.data.data_parallel import DataParallel, Shard
from minimegatron.parallel.data.units import units_of


class _AllGather(AllGather):
    """FSDP2's all-gather on gloo, by `comm/collectives`: with a third of the copies."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        all_gather_start(input_tensor, self.axis, output_tensor).wait()


class _ReduceScatter(_AllGather, ReduceScatter):
    """FSDP2's reduce-scatter on gloo, by `comm/collectives`; a sum, in the dtype of the input."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        reduce_scatter_start(input_tensor, self.axis, output_tensor).wait()


class TorchFSDP2(DataParallel):
    """A model sharded by torch's `fully_shard`.

    Args:
        module: the model of this rank.
        mesh: parameters are cut over `mesh.dp_shard`, those of experts over `mesh.edp_shard`.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__(module, mesh)
        layouts = {name: layout_of(param) for name, param in module.named_parameters()}
        dtypes = {param.dtype for param in module.parameters() if param.requires_grad}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if dtype in (torch.bfloat16, torch.float16) else None,
            reduce_dtype=torch.float32 if dtype != torch.float64 else None,
            cast_forward_inputs=False,
        )
        self._gathered_in = policy.param_dtype
        if policy.param_dtype is not None:
            module.float()
        self.rounds_to = policy.param_dtype
        dense, experts = mesh.shard_mesh("dp"), mesh.shard_mesh("edp")
        of_experts: set[nn.Module] = set()
        for unit in reversed(units_of(module)):
            for part in unit.module.modules():
                own = list(part.parameters(recurse=False))
                if own and all(layout_of(p).experts is not None for p in own):
                    fully_shard(part, mesh=experts, mp_policy=policy)
                    of_experts.add(part)
            fully_shard(unit.module, mesh=dense, mp_policy=policy)
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            axis = mesh.edp_shard if part in of_experts else mesh.dp_shard
            if axis.size > 1 and is_gloo(axis):
                part.set_custom_all_gather(_AllGather(axis))
                part.set_custom_reduce_scatter(_ReduceScatter(axis))
        for name, param in module.named_parameters():  # they are new ones
            param.param_layout = layouts[name]  # type: ignore[attr-defined]
        self._grads = {name: torch.zeros_like(_local(param)) for param, name in self.names.items()}

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._gathered_in or super().compute_dtype

    def zero_grad_buffer(self) -> None:
        for param, name in self.names.items():
            param.grad = None
            self._grads[name].zero_()

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        """FSDP2 sums over the ranks of an instance in every microbatch, and over instances in the last one."""
        self._sum_over_instances(bool(names))
        yield
        self._sum_over_instances(True)

    def _sum_over_instances(self, on: bool) -> None:
        for part in self._parts:
            part.set_requires_all_reduce(on, recurse=False)

    def finish_grad_sync(self) -> None:
        for param, name in self.names.items():
            if param.grad is not None:
                self._grads[name].copy_(_local(param.grad))
                param.grad = None

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        for grad in self._grads.values():
            grad.div_(divisor.to(grad.dtype))

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        for grad in self._grads.values():
            grad.mul_(factor)

    def start_param_gather(self) -> None:
        self.end_evaluation()  # what is gathered is old

    def end_evaluation(self) -> None:
        for part in self._parts:
            part.reshard()

    def shards(self) -> dict[str, Shard]:
        shards = {}
        for param, name in self.names.items():
            local, grad = _local(param.detach()), self._grads[name]
            if local.numel():
                start = _first_row(param) * (local.numel() // local.shape[0])
                shards[name] = Shard(slice(start, start + local.numel()), grad.view(-1), local.view(-1))
        return shards

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        gradients = {}
        for param, name in self.names.items():
            assert isinstance(param, DTensor), "fully_shard has made it one"
            grad = DTensor.from_local(
                self._grads[name], param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
            gradients[name] = grad.full_tensor()
        return gradients

    def held(self) -> dict[str, list[torch.Tensor]]:
        return {
            "parameters": [_local(param.detach()) for param in self.module.parameters()],
            "gradients": list(self._grads.values()),
        }

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """In the block the model has plain parameters with their layouts, also if layers have run before."""
        sharded = {name: layout_of(param) for name, param in self.module.named_parameters()}
        inside = [part for part in self._parts if not getattr(part, "is_stage", False)]
        for part in inside:
            part.set_reshard_after_forward(False, recurse=False)
        for part in self._parts:
            part.unshard()
        for name, param in self.module.named_parameters():
            param.param_layout = sharded[name]  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for part in inside:
                part.set_reshard_after_forward(True, recurse=False)
            for part in self._parts:
                part.reshard()


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _first_row(param: torch.Tensor) -> int:
    """Index in dim 0 of this rank's first row."""
    assert isinstance(param, DTensor), "fully_shard has made it one"
    rows = -(-param.shape[0] // param.device_mesh.size(-1))
    return min(rows * param.device_mesh.get_local_rank(-1), param.shape[0])
