"""Two runs in one layout, with other flags: every tensor of the first batch, on every rank.

A rank compares the same tensors of its own, so nothing is sent but what was found. Whatever the two runs compute in,
the limit is what rounding makes of the first of them, beside a run of it in fp64 (`comparison/distance`).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Dataset
from minimegatron.training.comparison.distance import (
    MARGIN,
    distance_of,
    largest_by_pass,
    measured_limits,
    where_of,
)
from minimegatron.training.comparison.findings import (
    Comparison,
    Found,
    Sums,
    compare_recomputed,
    describe,
    of_all_ranks,
)
from minimegatron.training.comparison.first_batch import first_batch, own_model
from minimegatron.training.observers.checks import FLOOR, Gradients, model_in_fp64
from minimegatron.training.probe import Place
from minimegatron.training.step import ForwardStep


def same_layout(run: RunConfig, other: RunConfig) -> Sequence[str]:
    """Fields of the layout, the data or the batch in which two runs differ."""
    ours, theirs = run.fields(), other.fields()
    own = {f.name for f in dataclasses.fields(type(run.data))} | {"seed", "micro_batch_size", "global_batch_size"}
    own |= {
        f"{axis}_parallel_size"
        for axis in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    }
    own |= {"order", "num_layers_per_virtual_pipeline_stage", "sequence_parallel"}
    return sorted(name for name in own & ours.keys() if ours[name] != theirs[name])


def compare_runs(
    run: RunConfig,
    other: RunConfig,
    mesh: Mesh,
    dataset: Dataset,
    batch_size: int,
    forward_step: ForwardStep,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Compare a run with one of other flags in the same layout; the limit is what rounding makes of the first.

    Args:
        run, other: the configurations; they differ in how the same numbers are computed.
        mesh, dataset, batch_size, forward_step, progress: as in `compare_with_twin`.
    """
    progress("the run in fp64")
    reference = first_batch(run, model_in_fp64(run, mesh), dataset, batch_size, forward_step)
    progress("the run")
    first = first_batch(run, own_model(run, mesh), dataset, batch_size, forward_step)
    progress("the run with the other flags")
    second = first_batch(other, own_model(other, mesh), dataset, batch_size, forward_step)
    here = largest_by_pass(reference.tensors)
    largest = {phase: max(gather_objects(top, mesh.world)) for phase, top in here.items()}
    limits = measured_limits(reference.tensors, first.tensors, largest, _coarser(run, other))
    order, found = dict[Place, str](), dict[Place, Found]()
    for phase in ("forward", "gradient"):
        for place in limits:
            if place.phase != phase or place not in second.tensors:
                continue
            module = first.modules[place.module]
            order.setdefault(place.anywhere, "" if module is None else type(module).__name__)
            a, b = first.tensors[place], second.tensors[place]
            found.setdefault(place.anywhere, Found()).add(
                distance_of(b, a, FLOOR * largest[phase]),
                limits[place],
                lambda a=a, b=b, place=place: f"microbatch {place.microbatch}: {where_of(b, a)}",  # type: ignore[misc]
            )
    for one in (first, second):
        compare_recomputed(one, order, found)
    assert reference.gradients is not None and first.gradients is not None and second.gradients is not None
    sums = _sums_of_same(reference.gradients, first.gradients, second.gradients, mesh, _coarser(run, other))
    return of_all_ranks(mesh, order, found, sums, set(), f"two ways to compute it on {describe(mesh)}")


def _coarser(run: RunConfig, other: RunConfig) -> torch.dtype:
    return max((run.model.dtype, other.model.dtype), key=lambda dtype: torch.finfo(dtype).eps)


def _sums_of_same(exact: Gradients, first: Gradients, second: Gradients, mesh: Mesh, dtype: torch.dtype) -> Sums:
    """Gradients of parameters, losses and norm of two runs in one layout."""
    wholes = [result.model.whole_gradients() for result in (exact, first, second)]
    top = max([0.0, *(grad.abs().max().item() for grad in wholes[0].values() if grad.numel())])
    floor = FLOOR * max(*gather_objects(top, mesh.world), 1e-300)
    eps = torch.finfo(dtype).eps
    noise = {n: distance_of(wholes[1][n], g, floor) for n, g in wholes[0].items()}
    every = gather_objects(noise, mesh.world)
    names = list(dict.fromkeys(name for theirs in every for name in theirs))
    usual = statistics.median(max(theirs.get(n, 0.0) for theirs in every) for n in names)
    rows: Sums = []
    for name in reversed(names):
        limit = MARGIN * max(max(theirs.get(name, 0.0) for theirs in every), usual, eps)
        distance = distance_of(wholes[2][name], wholes[1][name], floor) if name in noise else 0.0
        note = where_of(wholes[2][name], wholes[1][name]) if distance > limit else ""
        rows.append(("parameter", name, distance, limit, distance > limit, note))
    pairs = {n: (second.losses[n], first.losses[n]) for n in first.losses} | {"norm": (second.norm, first.norm)}
    for name, (got, want) in pairs.items():
        distance, limit = abs(got - want) / max(abs(want), 1e-300), MARGIN * max(usual, eps)
        rows.append(("sum", "the norm of the gradient" if name == "norm" else name, distance, limit,
                     not distance <= limit, f"{got:.9g} and {want:.9g}"))  # fmt: skip
    return rows
