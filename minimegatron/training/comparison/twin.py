"""A layout beside its serial twin: every tensor of the first batch, on every rank.

Every rank runs the first batch in the layout of the run and keeps each tensor (`comparison/first_batch`). Then rank 0
runs the same batch alone, on a mesh of ones with the same weights, a microbatch at a time, and broadcasts each tensor.
A rank compares its own *part* of it (`comparison/twin_parts`). Microbatch j of dp rank d is microbatch j D + d of the
twin. Rows of experts come from several ranks, and are compared by (expert, token).

In fp64 the limit is fixed. In the run's own precision a second twin in that precision measures it
(`comparison/distance`).

| message                  | axis    | bytes         |
|--------------------------|---------|---------------|
| every tensor of the twin | `world` | 8 per element |
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.comm.agree import on_rank_zero
from minimegatron.comm.collectives import all_reduce, broadcast
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.layers.moe.layer import Experts
from minimegatron.layers.param import layout_of
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.comparison.distance import (
    EXACT,
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
from minimegatron.training.comparison.first_batch import Seen, dispatched_tokens, first_batch, own_model
from minimegatron.training.comparison.twin_parts import part_of, partial_over
from minimegatron.training.datasets import microbatches
from minimegatron.training.observers.checks import FLOOR, Gradients, distances, finished, model_in_fp64
from minimegatron.training.probe import Place, Probe
from minimegatron.training.step import ForwardStep


class Twin:
    """The first batch on rank 0 alone, a microbatch at a time.

    Args:
        run, dataset, batch_size, forward_step: as in `compare_with_twin`.
        ddp: its model, on a mesh of ones.
    """

    def __init__(
        self, run: RunConfig, ddp: DataParallel, dataset: Dataset, batch_size: int, forward_step: ForwardStep
    ) -> None:
        self.run, self.ddp, self.forward_step = run, ddp, forward_step
        self.count = batch_size // run.training.micro_batch_size
        mesh = ddp.mesh
        self.batches: Iterator[Batch] = microbatches(dataset, run.training.micro_batch_size, mesh, 0, mesh.device)
        self.hooks, self.inside = StepHooks(ddp, mesh), contextlib.ExitStack()
        self.inside.enter_context(self.hooks.passes(1.0))
        self.tokens = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.reports: dict[str, torch.Tensor] = {}

    def microbatch(self, number: int) -> Seen:
        """Forward and backward of the next microbatch."""
        seen = Seen()
        probe = Probe(self.ddp, seen.see)
        probe.begin(number)
        with probe.watching(), dispatched_tokens(self.ddp, self.run, seen.rows):
            with contextlib.nullcontext() if number == self.count - 1 else self.ddp.no_sync():
                output, summed = probe.of(self.forward_step)(self.batches, self.ddp)
                loss, num_tokens, report = summed(output)
                with self.ddp.backward_pass():
                    loss.backward()
        self.tokens += num_tokens.detach()
        for name, pair in report.items():
            self.reports[name] = self.reports.get(name, 0.0) + pair.detach().double()
        return seen

    def end(self) -> Gradients:
        """Sums and norm of the whole batch."""
        self.inside.close()
        return finished(self.run, self.ddp, self.tokens, self.reports | self.hooks.reports())


def compare_with_twin(
    run: RunConfig,
    mesh: Mesh,
    dataset: Dataset,
    batch_size: int,
    forward_step: ForwardStep,
    exact: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Compare the first batch in the layout of a run with its serial twin in fp64; all ranks must call it.

    Args:
        run: the configuration, with the vocabulary of its data.
        mesh: the layout.
        dataset: its first `batch_size` samples are the batch.
        batch_size: samples of the step, over all ranks.
        forward_step: the model's forward pass and its loss.
        exact: run the layout in fp64, too; else in its own precision, with a measured limit.
        progress: is told what happens.
    """
    s, b, dp = run.data.seq_length, run.training.micro_batch_size, mesh.dp.size
    progress("the layout runs")
    mine = first_batch(
        run, model_in_fp64(run, mesh) if exact else own_model(run, mesh), dataset, batch_size, forward_step
    )
    assert mine.gradients is not None
    twins: list[Twin] = []

    def build() -> int:
        serial = Mesh.serial(device=mesh.device)
        twins.append(Twin(run, model_in_fp64(run, serial), dataset, batch_size, forward_step))
        if not exact:
            twins.append(Twin(run, own_model(run, serial), dataset, batch_size, forward_step))
        return twins[0].count

    count = on_rank_zero(build, mesh.world)
    order: dict[Place, str] = {}  # of the twin, with the class of the module
    found: dict[Place, Found] = {}
    left_out: set[str] = set()
    unmatched = {key: torch.ones(len(rows), dtype=torch.bool) for key, rows in mine.rows.items()}
    for number in range(count):
        progress(f"the serial twin runs microbatch {number + 1} of {count}")
        seen: list[Seen] = []

        def run_one(number: int = number, seen: list[Seen] = seen) -> tuple[list[Any], dict[str, float]]:
            seen += [twin.microbatch(number) for twin in twins]
            return _listed(seen, run, exact)

        listed, largest = on_rank_zero(run_one, mesh.world)
        for place, kind, shape, keyed, limit in listed:
            whole = torch.empty(shape, dtype=torch.float64, device=mesh.device)
            keys = torch.empty(shape[:1] if keyed else (0,), dtype=torch.int64, device=mesh.device)
            if seen:
                whole.copy_(seen[0].tensors[place])
                if keyed:
                    keys.copy_(seen[0].rows[place.module, number])
            broadcast(whole, mesh.world)
            if keyed:
                broadcast(keys, mesh.world)
            order.setdefault(place.anywhere, kind)
            of_place = found.setdefault(place.anywhere, Found())
            floor = FLOOR * largest[place.phase]
            here = place._replace(microbatch=number // dp)
            module = mine.modules.get(place.module)
            if keyed:
                at = f"microbatch {here.microbatch}, rows of samples {number * b} to {number * b + b - 1}"
                _compare_rows(mine, here, whole, keys, unmatched, of_place, limit, floor, mesh, at)
                continue
            if number % dp != mesh.dp.rank:
                continue
            got = mine.tensors.get(here)
            if got is None:
                continue
            axis = partial_over(here, module, mesh)
            got = got if axis is None else all_reduce(got.clone(), axis)
            both = part_of(whole, got, module, mesh, s, b, place.phase == "gradient")
            if both is None:
                left_out.add(f"{place.phase} {place}: {tuple(got.shape)} of {tuple(whole.shape)}")
                continue
            want, got = both
            at = f"microbatch {here.microbatch}, samples {number * b} to {number * b + b - 1}"
            of_place.add(
                distance_of(got, want, floor),
                limit,
                lambda got=got, want=want, at=at: f"{at}: {where_of(got, want)}",  # type: ignore[misc]
            )
    for (name, number), alone in unmatched.items():
        place = Place("forward", name, 0, 0, -1)
        if place in found and bool(alone.any()):
            text = f"microbatch {number}: {int(alone.sum())} rows that these experts do not get in one process"
            found[place].add(math.inf, EXACT, lambda text=text: text)  # type: ignore[misc]
    compare_recomputed(mine, order, found)
    sums = _of_sums(run, mesh, mine.gradients, twins, exact)
    what = f"{describe(mesh)} with one process, " + ("in fp64" if exact else f"in {run.model.params_dtype} and fp64")
    return of_all_ranks(mesh, order, found, sums, left_out, what)


def _listed(seen: list[Seen], run: RunConfig, exact: bool) -> tuple[list[Any], dict[str, float]]:
    """On rank 0: (place, class, shape, whether rows have keys, limit) of each tensor; the largest element by pass."""
    twin = seen[0]
    largest = largest_by_pass(twin.tensors)
    limits = dict.fromkeys(twin.tensors, EXACT)
    if not exact:
        limits = measured_limits(twin.tensors, seen[1].tensors, largest, run.model.dtype)
    rows = []
    for phase in ("forward", "gradient"):
        for place, tensor in twin.tensors.items():
            if place.phase == phase and place in limits:
                module = twin.modules[place.module]
                keyed = isinstance(module, Experts)
                rows.append((place, "" if module is None else type(module).__name__, tuple(tensor.shape), keyed,
                             limits[place]))  # fmt: skip
    return rows, largest


def _compare_rows(
    mine: Seen,
    here: Place,
    whole: torch.Tensor,
    keys: torch.Tensor,
    unmatched: dict[tuple[str, int], torch.Tensor],
    found: Found,
    limit: float,
    floor: float,
    mesh: Mesh,
    at: str,
) -> None:
    """Rows of experts, whatever ranks their tokens come from."""
    own, got = mine.rows.get((here.module, here.microbatch)), mine.tensors.get(here)
    if own is None or got is None or here.output:
        return
    axis = partial_over(here, mine.modules[here.module], mesh)
    got = got if axis is None else all_reduce(got.clone(), axis)
    by_key, order = keys.sort()
    index = torch.searchsorted(by_key, own).clamp(max=max(len(by_key) - 1, 0))
    match = by_key[index] == own if len(by_key) else torch.zeros_like(own, dtype=torch.bool)
    if here.phase == "forward":
        unmatched[here.module, here.microbatch] &= ~match.cpu()
    rows, want = got[match], whole[order[index[match]]]
    found.add(distance_of(rows, want, floor), limit, lambda: f"{at}: {where_of(rows, want)}")


def _of_sums(run: RunConfig, mesh: Mesh, mine: Gradients, twins: list[Twin], exact: bool) -> Sums:
    """Gradients of parameters, losses and norm, which the ranks have summed."""

    def end() -> tuple[dict[str, float], Any, float, float, dict[str, float]]:
        results = [twin.end() for twin in twins]
        model = results[0].model
        whole = {name: grad.double() for name, grad in model.whole_gradients().items()}
        largest = max(grad.abs().max().item() for grad in whole.values())
        logical = [(n, layout_of(p).unpadded_shape) for n, p in model.params.items()]
        own = {name: EXACT for name in (*whole, *results[0].losses, "norm")}
        if not exact:
            rounded = results[1].model.whole_gradients()
            eps = torch.finfo(run.model.dtype).eps
            noise = {n: distance_of(rounded[n], g, FLOOR * largest) for n, g in whole.items()}
            usual = statistics.median(noise.values())
            own = {n: MARGIN * max(d, usual, eps) for n, d in noise.items()}
            own |= dict.fromkeys([*results[0].losses, "norm"], MARGIN * max(usual, eps))
        return results[0].losses, logical, largest, results[0].norm, own

    losses, logical, largest, norm, limits = on_rank_zero(end, mesh.world)
    twin = twins[0].ddp if twins else None
    floor, notes = max(FLOOR * largest, 1e-300), dict[str, str]()

    def note_if_off(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if distance_of(got, want, floor) > limits[name]:
            notes[name] = where_of(got, want)

    off = distances(mine.model, twin, logical, floor, note_if_off).tolist()
    rows: Sums = []
    for (name, _), distance in zip(reversed(logical), reversed(off), strict=True):
        rows.append(("parameter", name, distance, limits[name], distance > limits[name], notes.get(name, "")))
    for name, want in losses.items():
        got = mine.losses[name]
        distance = abs(got - want) / max(abs(want), 1e-300)
        note = f"{got:.9g}, and {want:.9g} in one process"
        rows.append(("sum", name, distance, limits[name], not distance <= limits[name], note))
    distance = abs(mine.norm - norm) / max(norm, 1e-300)
    note = f"{mine.norm:.9g}, and {norm:.9g} in one process"
    rows.append(("sum", "the norm of the gradient", distance, limits["norm"], not distance <= limits["norm"], note))
    return rows
