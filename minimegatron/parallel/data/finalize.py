"""The last sums over gradients, and the one division.

The problem in a sentence: after the backward pass and the sum over data-parallel ranks, some replicated parameters
still hold only a part of their gradient, and nothing has been divided by the number of tokens yet.

| parameter                                        | gradient on each tp rank is of | sum over tp when     |
|--------------------------------------------------|--------------------------------|----------------------|
| cut over tp (matrices, vocabulary)               | its own part, complete         | never                |
| norms, row biases, positions (`"sequence"`)      | its own tokens (sp), else all  | sequence parallelism |
| norms of queries and keys (`"heads"`)            | its own heads                  | always               |
| fc2 biases, adapters of experts (`"experts"`)    | its own part of a sum          | never; over etp      |
| other replicated parameters (`""`)               | everything                     | never                |

`partial_axes` is this table; a parameter's row is part of its layout (`layers/param`), declared where the parameter is
created. All gradients of one axis travel in one flat message.

Then every gradient is divided once by the number of tokens that counted in the whole batch: over all microbatches, all
dp ranks, all cp ranks. That makes the gradient independent of how the batch was cut.

A tied embedding of a pipeline has two copies, on the first stage and on the last, and each has the gradient of its own
use: the gradients are summed over `embd`, so both copies take the same steps. Where both stages are on one rank the
matrix is one tensor, and autograd has added up its gradients.

Other gradients of experts need none of these sums. They have been summed over edp (`parallel/data/ddp`), and are
divided by the same number.

Order: first the sum over dp_cp, then over tp; both orders give the same number, but with a sharded optimizer only the
first works. Megatron-LM: `megatron/core/distributed/finalize_model_grads.py`.
"""

from __future__ import annotations

import torch

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of
from minimegatron.parallel.data.data_parallel import DataParallel


def partial_axes(mesh: Mesh) -> dict[str, Axis | None]:
    """{kind of partial gradient: the axis over which it must be summed, or None if it is complete}."""
    return {"": None, "sequence": mesh.tp if mesh.sequence_parallel else None, "heads": mesh.tp, "experts": mesh.etp}


def sum_partial_gradients(model: DataParallel, mesh: Mesh) -> None:
    """Complete the gradients of replicated parameters, one flat all-reduce per axis."""
    by_axis: dict[str, list[torch.Tensor]] = {}
    axes, params = partial_axes(mesh), model.params
    for name, shard in model.shards().items():
        axis = axes[layout_of(params[name]).partial]
        if axis is not None and axis.size > 1:
            by_axis.setdefault(axis.name, []).append(shard.grad)
    for name, grads in by_axis.items():
        flat = all_reduce(torch.cat([g.flatten() for g in grads]), mesh.axis(name))
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def sum_tied_gradients(model: DataParallel, mesh: Mesh) -> None:
    """Add up the gradients of the copies of a tied weight on several pipeline stages."""
    params = model.params
    for name, shard in model.shards().items():
        if copies := layout_of(params[name]).copies:
            all_reduce(shard.grad, mesh.axis(copies))


def finalize_model_grads(model: DataParallel, mesh: Mesh, num_tokens: torch.Tensor) -> torch.Tensor:
    """Turn summed gradients, or shards of them, into those of the mean loss per token of the whole batch, in place.

    Args:
        model: after the last backward pass of the step; its loss was a *sum* over tokens.
        mesh: the layout.
        num_tokens: tokens of this rank's microbatches that are not masked (a scalar); 0 on all stages but the last.

    Returns:
        The global token count, a scalar in fp64. Where it is 0 gradients are 0 and not NaN, and the step is a bad one
        (`training/step`).
    """
    model.finish_grad_sync()
    sum_partial_gradients(model, mesh)
    sum_tied_gradients(model, mesh)
    total = all_reduce(num_tokens.detach().to(torch.float64).clone(), mesh.dp_cp)
    total = all_reduce(total, mesh.pp)
    model.divide_gradients(torch.where(total > 0, total, torch.ones_like(total)))
    return total
