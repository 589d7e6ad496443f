"""Two runs of the first batch, tensor by tensor: where do they begin to differ, on which rank, and is it too much?

The problem in a sentence: a run on eight ranks learns worse than it should, its loss is plausible, and the mistake is
one sum among thousands.

Every rank runs the first batch in the layout of the run and keeps what each module returned, and the gradient of it
(`training/probe`). Then one of two references is run with the same weights and data:

| reference       | who runs it                   | compared with                                          |
|-----------------|-------------------------------|--------------------------------------------------------|
| the serial twin | rank 0, on a mesh of ones     | each rank's *part* of its tensors, which are broadcast |
| other flags     | all ranks, in the same layout | the same tensors of the same rank                      |

**Which part** of a tensor of the twin is a rank's: `training/twin_parts`. Rows of experts are permuted and come from
several ranks: the numbers of their tokens are sent through the same dispatcher, and rows are compared by (expert,
token). Microbatch j of dp rank d is microbatch j D + d of the twin.

**How much is normal.** In fp64 (default) only mistakes are visible: roundings are near 1e-15 of a tensor's largest
element, the limit is 1e-7. In the run's own precision a rounding at the first layer moves every number behind it, and
no one limit is right for a loss and for the gradient of a norm. So the limit is measured, tensor by tensor: a third run
in that precision, of the twin (or of the layout with the first flags), is as far from fp64 as rounding alone
makes it, and a layout may be `MARGIN` times as far (right ones are within 2 times):

    |layout - fp64|  <=  MARGIN * max( |twin - fp64| here,  the median of it in this pass,  eps )

| message                      | axis                  | bytes                                        |
|------------------------------|-----------------------|----------------------------------------------|
| every tensor of the twin     | `world`               | 8 per element                                |
| numbers of dispatched tokens | those of a dispatcher | as `layers/moe/dispatch` of rows of length 1 |

A rank keeps all activations of the batch and their gradients: compare small models. Dropout is off. Megatron-LM has no
such comparison; its users ask which tolerance is normal.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minimegatron.comm.agree import gather_objects, on_rank_zero
from minimegatron.comm.collectives import all_reduce, broadcast
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.errors import named
from minimegatron.layers.moe.layer import Experts, MoELayer
from minimegatron.layers.moe.router import Routing
from minimegatron.layers.param import layout_of, logical_name
from minimegatron.layers.recompute import MICROBATCH
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.spec import spec_from_name
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.datasets import microbatches
from minimegatron.training.observers.checks import (
    FLOOR,
    Gradients,
    distances,
    finished,
    model_in_fp64,
    ready,
    shake,
)
from minimegatron.training.probe import Place, Probe
from minimegatron.training.step import ForwardStep, get_forward_backward_func
from minimegatron.training.twin_parts import part_of, partial_over, places_of

EXACT = 1e-7  # of a tensor's largest element, in fp64
MARGIN = 4.0
PASSES = ("forward", "recompute", "gradient", "parameter", "sum")
_ROW = 1 << 40  # more than there are tokens: key of a row = expert * _ROW + token


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference, over all microbatches and ranks.

    Attributes:
        phase: `forward`, `recompute`, `gradient`, `parameter`, or `sum` for a loss or the norm.
        name: the module, parameter or number.
        kind: class of the module, or "".
        distance: largest difference, in units of the tensor's largest element.
        limit: what is allowed.
        ranks: the ranks that are beyond it.
        note: microbatch, samples and place of the largest difference on the first of them.
    """

    phase: str
    name: str
    kind: str
    distance: float
    limit: float
    ranks: tuple[int, ...] = ()
    note: str = ""

    @property
    def bad(self) -> bool:
        return bool(self.ranks)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result, the same on every rank.

    Attributes:
        differences: of every tensor, in the order of execution.
        left_out: places that one side alone has, or of which the part is not known.
        coordinates: of each rank, e.g. `tp 1, pp 0`.
        what: what was compared with what.
    """

    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    coordinates: tuple[str, ...]
    what: str

    @property
    def first(self) -> Difference | None:
        """The first tensor beyond its limit, in the order of execution."""
        return next((d for d in self.differences if d.bad), None)

    def before(self, one: Difference) -> Difference | None:
        """The tensor before another in the same pass."""
        earlier = [d for d in self.differences[: self.differences.index(one)] if d.phase == one.phase]
        return earlier[-1] if earlier else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        first = self.first
        return {
            "what": self.what,
            "agree": first is None,
            "first": None if first is None else dataclasses.asdict(first),
            "differences": [dataclasses.asdict(d) for d in self.differences],
            "left_out": list(self.left_out),
            "coordinates": list(self.coordinates),
        }


# ------------------------------------------------------------------------------------------------------ one run


@dataclasses.dataclass
class Seen:
    """What one run has computed on this rank.

    Attributes:
        tensors: every output, gradient and recomputed output.
        rows: (module of experts, microbatch) -> key of each row.
        modules: name -> module.
        gradients: losses, model and norm at the end.
    """

    tensors: dict[Place, torch.Tensor] = dataclasses.field(default_factory=dict)
    rows: dict[tuple[str, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    modules: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: Gradients | None = None

    def see(self, place: Place, tensor: torch.Tensor, module: Any) -> None:
        """Keep a tensor; it may be changed in place later, so a copy."""
        self.tensors[place] = tensor.clone()
        self.modules[place.module] = module


def own_model(run: RunConfig, mesh: Mesh) -> DataParallel:
    """The model of a run at step 0 in its own precision and by its own kernels, without dropout: the weights of
    `model_in_fp64`."""
    config = run.model.replace(hidden_dropout=0.0, attention_dropout=0.0, lora_base=None)
    model = build_model_chunks(config, mesh, run.training.seed, spec_from_name(run.spec, config))
    shake(model, run.training.seed)
    return ready(run, model, mesh, run.optimizer.grad_dtype)


def first_batch(
    run: RunConfig,
    ddp: DataParallel,
    dataset: Dataset,
    batch_size: int,
    forward_step: ForwardStep,
) -> Seen:
    """Run the first batch in the layout of the model, and keep all of it."""
    mesh, size, seen = ddp.mesh, run.training.micro_batch_size, Seen()
    probe = Probe(ddp, seen.see)
    batches = microbatches(dataset, size, mesh, 0, mesh.device)
    hooks, passes = StepHooks(ddp, mesh), get_forward_backward_func(ddp)
    count = batch_size // (size * mesh.dp.size)
    with probe.watching(), dispatched_tokens(ddp, run, seen.rows), hooks.passes(1.0):
        tokens, reports = passes(probe.of(forward_step), batches, ddp, count, lambda loss: loss)
    seen.gradients = finished(run, ddp, tokens, reports | hooks.reports())
    return seen


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


@contextlib.contextmanager
def dispatched_tokens(
    model: torch.nn.Module, run: RunConfig, rows: dict[tuple[str, int], torch.Tensor]
) -> Iterator[None]:
    """In the block `rows` gets the keys of what every layer's experts are sent.

    A layer's dispatcher sends the numbers of the tokens as it sends the tokens, in a context of its own: what the host
    reads there is not what the layer reads.
    """

    def after(name: str, layer: MoELayer) -> Callable[..., None]:
        mesh, b, s = layer.mesh, run.training.micro_batch_size, run.data.seq_length

        @torch.no_grad()
        def hook(module: Any, args: Any, routing: Routing) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # recomputed
            number = MICROBATCH.get(0)
            first = (number * mesh.dp.size + mesh.dp.rank) * b
            samples = torch.arange(first, first + b, device=mesh.device)
            tokens = (places_of(s, mesh, mesh.sequence_parallel)[:, None] + s * samples).flatten()[:, None].double()
            alike = Routing(routing.probs.double(), routing.map)
            sent = contextvars.Context().run(lambda: layer.dispatcher.dispatch(tokens, alike)())
            experts = torch.arange(*layer.experts.here, device=mesh.device)
            of_row = experts.repeat_interleave(torch.tensor(sent.counts, device=mesh.device))
            rows[f"{name}.experts", number] = of_row * _ROW + sent.rows[:, 0].round().long()

        return hook

    hooks = [
        layer.router.register_forward_hook(after(logical_name(name), layer))
        for name, layer in model.named_modules()
        if isinstance(layer, MoELayer)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ------------------------------------------------------------------------------------------------------ the comparison


@dataclasses.dataclass
class Found:
    """What this rank has found of a place, in all microbatches."""

    distance: float = 0.0
    limit: float = math.inf
    note: str = ""
    bad: bool = False
    compared: bool = False

    def add(self, distance: float, limit: float, note: Callable[[], str]) -> None:
        bad = not distance <= limit
        if not self.compared or (bad and not self.bad) or (bad == self.bad and distance > self.distance):
            self.distance, self.limit, self.note = distance, limit, note() if bad else ""
        self.bad, self.compared = self.bad or bad, True


def distance_of(got: torch.Tensor, want: torch.Tensor, floor: float) -> float:
    """max |got - want| / max |want|; inf where one is not finite and the other is."""
    if got.shape != want.shape:
        return math.inf
    if not got.numel():
        return 0.0
    got, want = got.double(), want.double()
    alike = (got == want) | (got.isnan() & want.isnan())
    off = (got - want).abs().masked_fill(alike, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    return off / max(want.abs().nan_to_num(posinf=0.0).max().item(), floor) if off else 0.0


def _at(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where the largest difference is, and the factor if there is one."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, and the reference has {tuple(want.shape)}"
    off = (got.double() - want.double()).abs().nan_to_num(nan=math.inf)
    flat = int(off.flatten().argmax())
    index = []
    for length in reversed(off.shape):
        flat, i = divmod(flat, length)
        index.append(i)
    place = f"largest at {list(reversed(index))}" if index else ""
    factor = factor_of(got, want)
    return ", ".join(filter(None, [place, f"it is {factor:.6g} times the reference" if factor else ""]))


def factor_of(got: torch.Tensor, want: torch.Tensor) -> float | None:
    """c if got = c want to 5 digits, else None."""
    a, b = got.double().flatten(), want.double().flatten()
    square = (b * b).sum().item()
    if not square or not math.isfinite(square):
        return None
    c = ((a * b).sum() / square).item()
    return c if math.isfinite(c) and (a - c * b).norm().item() <= 1e-5 * abs(c) * square**0.5 and c else None


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
                lambda got=got, want=want, at=at: f"{at}: {_at(got, want)}",  # type: ignore[misc]
            )
    for (name, number), alone in unmatched.items():
        place = Place("forward", name, 0, 0, -1)
        if place in found and bool(alone.any()):
            text = f"microbatch {number}: {int(alone.sum())} rows that these experts do not get in one process"
            found[place].add(math.inf, EXACT, lambda text=text: text)  # type: ignore[misc]
    _recomputed(mine, order, found)
    sums = _of_sums(run, mesh, mine.gradients, twins, exact)
    what = f"{describe(mesh)} with one process, " + ("in fp64" if exact else f"in {run.model.params_dtype} and fp64")
    return _comparison(mesh, order, found, sums, left_out, what)


def _listed(seen: list[Seen], run: RunConfig, exact: bool) -> tuple[list[Any], dict[str, float]]:
    """On rank 0: (place, class, shape, whether rows have keys, limit) of each tensor; the largest element by pass."""
    twin = seen[0]
    largest: dict[str, float] = {}
    for place, tensor in twin.tensors.items():
        top = tensor.double().abs().nan_to_num(posinf=0.0).max().item() if tensor.numel() else 0.0
        largest[place.phase] = max(largest.get(place.phase, 1e-300), top)
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


def measured_limits(
    exact: dict[Place, torch.Tensor],
    rounded: dict[Place, torch.Tensor],
    largest: dict[str, float],
    dtype: torch.dtype,
) -> dict[Place, float]:
    """`MARGIN` times the distance that rounding makes: here, as a rule in this pass, or of one number."""
    both = [place for place in exact if place in rounded]
    noise = {p: distance_of(rounded[p], exact[p], FLOOR * largest[p.phase]) for p in both}
    usual = {
        phase: statistics.median([d for p, d in noise.items() if p.phase == phase] or [0.0])
        for phase in ("forward", "gradient", "recompute")
    }
    eps = torch.finfo(dtype).eps
    return {p: MARGIN * max(noise[p], usual[p.phase], eps) for p in both}


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
    found.add(distance_of(rows, want, floor), limit, lambda: f"{at}: {_at(rows, want)}")


def _recomputed(mine: Seen, order: dict[Place, str], found: dict[Place, Found]) -> None:
    """What the backward pass has computed again must be what the forward pass has computed, bit for bit."""
    for place, tensor in mine.tensors.items():
        before = mine.tensors.get(place._replace(phase="forward"))
        if place.phase == "recompute" and before is not None:
            order.setdefault(place.anywhere, type(mine.modules[place.module]).__name__)
            found.setdefault(place.anywhere, Found()).add(
                distance_of(tensor, before, 1e-300),
                0.0,
                lambda place=place, a=tensor, b=before: f"microbatch {place.microbatch}: {_at(a, b)}",  # type: ignore[misc]
            )


Sums = list[tuple[str, str, float, float, bool, str]]  # phase, name, distance, limit, bad on this rank, note


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
            notes[name] = _at(got, want)

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


def _comparison(
    mesh: Mesh, order: dict[Place, str], found: dict[Place, Found], sums: Sums, left_out: set[str], what: str
) -> Comparison:
    """The findings of all ranks together."""
    everyone = gather_objects((found, sums, sorted(left_out), order), mesh.world)
    kinds: dict[Place, str] = {}
    for _, _, _, theirs in everyone:
        kinds |= {place: kind for place, kind in theirs.items() if place not in kinds}
    rows, alone = [], set[str]()
    for phase in PASSES[:3]:
        for place, kind in kinds.items():
            if place.phase != phase:
                continue
            by_rank = {r: f for r, (theirs, *_) in zip(mesh.world.ranks, everyone, strict=True)
                       if (f := theirs.get(place)) is not None and f.compared}  # fmt: skip
            if not by_rank:
                alone.add(f"{phase} {place}: on one side only")
                continue
            bad = {r: f for r, f in by_rank.items() if f.bad}
            worst = max((bad or by_rank).values(), key=lambda f: f.distance)
            note = next(iter(bad.values())).note if bad else ""
            rows.append(Difference(phase, str(place), kind, worst.distance, worst.limit, tuple(bad), note))
    for index, (phase, name, _, limit, _, _) in enumerate(sums):
        each = [theirs[index] for _, theirs, _, _ in everyone]
        wrong = tuple(r for r, row in zip(mesh.world.ranks, each, strict=True) if row[4])
        worst_row = max(each, key=lambda row: row[2])
        rows.append(Difference(phase, name, "", worst_row[2], limit, wrong, worst_row[5]))
    not_known = {line for _, _, lines, _ in everyone for line in lines}
    return Comparison(
        tuple(rows), tuple(sorted(not_known | alone)), tuple(gather_objects(coordinates(mesh), mesh.world)), what
    )


# ------------------------------------------------------------------------------------------------------ the same layout


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
    largest: dict[str, float] = {}
    for place, tensor in reference.tensors.items():
        top = tensor.double().abs().nan_to_num(posinf=0.0).max().item() if tensor.numel() else 0.0
        largest[place.phase] = max(largest.get(place.phase, 1e-300), top)
    for phase, top in list(largest.items()):
        largest[phase] = max(gather_objects(top, mesh.world))
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
                lambda a=a, b=b, place=place: f"microbatch {place.microbatch}: {_at(b, a)}",  # type: ignore[misc]
            )
    for one in (first, second):
        _recomputed(one, order, found)
    assert reference.gradients is not None and first.gradients is not None and second.gradients is not None
    sums = _sums_of_same(reference.gradients, first.gradients, second.gradients, mesh, _coarser(run, other))
    return _comparison(mesh, order, found, sums, set(), f"two ways to compute it on {describe(mesh)}")


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
        note = _at(wholes[2][name], wholes[1][name]) if distance > limit else ""
        rows.append(("parameter", name, distance, limit, distance > limit, note))
    pairs = {n: (second.losses[n], first.losses[n]) for n in first.losses} | {"norm": (second.norm, first.norm)}
    for name, (got, want) in pairs.items():
        distance, limit = abs(got - want) / max(abs(want), 1e-300), MARGIN * max(usual, eps)
        rows.append(("sum", "the norm of the gradient" if name == "norm" else name, distance, limit,
                     not distance <= limit, f"{got:.9g} and {want:.9g}"))  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------------ the report


def coordinates(mesh: Mesh) -> str:
    """This rank's coordinates on the axes that have several ranks: `tp 1, pp 0`; etp only where it is not tp."""
    axes = [(name, mesh.axis(name)) for name in _axes(mesh)]
    return ", ".join(f"{name} {axis.rank}" for name, axis in axes if axis.size > 1)


def _axes(mesh: Mesh) -> list[str]:
    return ["tp", "cp", "dp", "pp", "ep"] + (["etp"] if mesh.etp.size != mesh.tp.size else [])


def describe(mesh: Mesh) -> str:
    """`4 ranks (tp2 pp2, sequence parallel)`."""
    sizes = [f"{n}{mesh.axis(n).size}" for n in _axes(mesh) if mesh.axis(n).size > 1]
    more = ", sequence parallel" if mesh.sequence_parallel else ""
    inside = f" ({' '.join(sizes)}{more})" if sizes else ""
    return f"{mesh.world.size} rank{'s'[: mesh.world.size > 1]}{inside}"


KINDS_OF = {
    "forward": "the output of",
    "recompute": "the recomputed output of",
    "gradient": "the gradient of the output of",
    "parameter": "the gradient of",
    "sum": "",
}


def verdict(result: Comparison) -> tuple[str, str, str]:
    """(What, where, fix) of the first difference; what alone if there is none."""
    first = result.first
    counts = {phase: sum(d.phase == phase for d in result.differences) for phase in PASSES}
    parts = [f"{counts['forward']} outputs", f"{counts['gradient']} gradients of outputs"]
    parts += [f"{counts['recompute']} recomputed outputs"] if counts["recompute"] else []
    parts += [f"{counts['parameter']} gradients of parameters", "losses and norm"]
    if first is None:
        closest = max(result.differences, key=lambda d: d.distance / d.limit if d.limit else d.distance)
        far = f"largest difference {closest.distance:.0e} of a limit of {closest.limit:.0e}, {closest.name}"
        return f"{result.what}: {', '.join(parts)} agree ({far})", "", ""
    kind = f" ({first.kind})" if first.kind else ""
    subject = f"{KINDS_OF[first.phase]} {first.name}{kind}".strip()
    before = result.before(first)
    so_far = "" if before is None else f"; the one before it, {before.name}, agrees"
    note = f"; {first.note}" if first.note else ""
    what = (
        f"{result.what}: first {subject} differs, by {first.distance:.1e} of its largest element, "
        f"where {first.limit:.0e} is normal{so_far}{note}"
    )
    where = named(first.ranks)
    alone = len(first.ranks) == 1
    places = [("" if alone else f"{r}: ") + result.coordinates[r] for r in first.ranks[:8] if result.coordinates[r]]
    where += f" ({'; '.join(places)})" if places and len(first.ranks) < len(result.coordinates) else ""
    if len(first.ranks) == len(result.coordinates) > 1:
        where = f"all {len(first.ranks)} ranks"
    return what, where, _advice(first, before)


def _advice(first: Difference, before: Difference | None) -> str:
    if first.phase == "forward":
        between = f"what {first.name} does, or what lies between {before.name} and it" if before else first.name
        return f"look at {between}: a sum that is missing or made twice, a wrong part, a wrong number"
    if first.phase == "recompute":
        return f"look at what {first.name} draws or reads that is not its input: random streams, buffers"
    if first.phase == "gradient":
        after = f"the backward pass between {before.name} and {first.name}" if before else "the loss"
        return f"look at {after}: every output of the forward pass agrees"
    if first.phase == "parameter":
        return (
            "every activation and its gradient agree: look at wgrad of that module, and at the sums of gradients "
            "(parallel/data): missing, made twice, over other ranks, or divided by another count"
        )
    return "the tensors agree: look at how numbers are counted and summed over ranks"


def table(result: Comparison, rows: int = 12) -> str:
    """The first differences, one a line; `where` only where few ranks have one."""
    shown = [d for d in result.differences if d.bad]
    lines = [f"{'pass':<10} {'difference':>10} {'normal':>8}  {'ranks':<10} tensor"]
    for d in shown[:rows]:
        ranks = named(d.ranks).partition(" ")[2]
        lines.append(f"{d.phase:<10} {d.distance:>10.1e} {d.limit:>8.0e}  {ranks:<10} {d.name}")
    if len(shown) > rows:
        lines.append(f"and {len(shown) - rows} more of {len(result.differences)}; --json lists all")
    return "\n".join(lines)


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
