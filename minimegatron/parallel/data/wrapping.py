"""Which class makes replicas of a model, by the configuration."""

from __future__ import annotations

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import DistributedDataParallel


def data_parallel(module: nn.Module, mesh: Mesh, grad_dtype: torch.dtype = torch.float32) -> DataParallel:
    """The model as one of its replicas, as `mesh.parallel` says.

    Args:
        module: of this rank, on its device.
        mesh: its layout.
        grad_dtype: in which gradients are added up.
    """
    parallel = mesh.parallel
    if parallel.use_torch_fsdp2:
        from minimegatron.parallel.data.torch_fsdp import TorchFSDP2  # half a second

        return TorchFSDP2(module, mesh)
    return DistributedDataParallel(
        module,
        mesh,
        parallel.ddp_bucket_size,
        parallel.overlap_grad_reduce,
        grad_dtype,
        parallel.data_parallel_sharding_strategy,
        parallel.overlap_param_gather,
    )
