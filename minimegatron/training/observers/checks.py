"""Checks that ranks compute the same: the first step against one process, and copies of weights against each other.

`--check-replicas-interval N` compares copies of weights bit by bit every N steps (`comm/fingerprints`). But a sum that
is made twice, over the wrong ranks or with a wrong scale gives every replica the same wrong gradient; the loss falls
all the same, and Adam hides a wrong scale. `--check-first-step` finds those.

Before the first step the gradients of its batch are computed twice: by all ranks in the layout of the run, and by rank
0 alone on a mesh of ones. Both start from the weights of step 0, a function of the seed; parameters with constant
initial values get random ones first, because a bias of 0 that is added twice is still 0. Both compute in fp64, so that
only mistakes are visible: roundings are near 1e-15, the limit is 1e-7 of a tensor's largest element.

    every rank    model, backward, reductions in fp64        g of its own part
    rank 0        serial twin, the same samples              G of the logical tensor, broadcast one by one
    every rank    compares with its part of G: max |g - G| / max |G|; and the gradient norm that it would clip by

| message, beside the step's own | axis    | bytes         |
|--------------------------------|---------|---------------|
| each gradient of the twin      | `world` | 8 per element |

Both models are extra ones and are thrown away: no random number, statistic or weight of the run changes. The check
costs the memory of the model in fp64 and of its gradients on every rank, and the time of a whole batch on one rank; a
run for which that is too much is refused before it starts (`training/rules`). Dropout is off, and torch's functions
compute in place of kernels, so the check is of the layout, not of the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from minimegatron.comm.agree import gather_objects, on_rank_zero
from minimegatron.comm.collectives import all_reduce, broadcast
from minimegatron.comm.fingerprints import check_copies
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Dataset
from minimegatron.errors import RankError, named, ranges, ranks_by_value
from minimegatron.layers.logical import draw_part, gather_logical, part_of_logical
from minimegatron.layers.param import Init, copy_axes, layout_of, logical_parameters
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.spec import spec_from_name
from minimegatron.optim.build import main_params
from minimegatron.optim.clip import clip_coefficient
from minimegatron.optim.groups import freeze
from minimegatron.optim.optimizer import look
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.training.datasets import microbatches
from minimegatron.training.observers import Observer, Step
from minimegatron.training.reports import StepReport, reduce_reports
from minimegatron.training.step import ForwardStep, get_forward_backward_func

TOLERANCE = 1e-7
# What is smaller than this share of the largest gradient of the model is compared with that share: a bias of keys has
# a gradient of 0, of which only roundings are left.
FLOOR = 1e-6
SHAKE = 0.1  # standard deviation of what is added to norms and biases


class Gradients(NamedTuple):
    """The result of a batch: mean losses by name, the model with its gradients, and the norm by which this rank would
    clip."""

    losses: dict[str, float]
    model: DataParallel
    norm: float


class FirstStepCheck(Observer):
    """Runs `check_first_step` before the first step; see there for the arguments.

    Args:
        say: prints the result.
    """

    def __init__(
        self,
        run: RunConfig,
        mesh: Mesh,
        dataset: Dataset,
        batch_size: int,
        forward_step: ForwardStep,
        say: Callable[[str], None],
    ) -> None:
        self.checked, self.say = (run, mesh, dataset, batch_size, forward_step), say

    def begin(self, done: int) -> None:
        if done == 0:
            self.say(check_first_step(*self.checked))


def check_first_step(run: RunConfig, mesh: Mesh, dataset: Dataset, batch_size: int, forward_step: ForwardStep) -> str:
    """Compare the gradients of the first batch with those of one process; all ranks must call it.

    Args:
        run: the configuration, with the vocabulary of its data.
        mesh: the layout.
        dataset: its first `batch_size` samples are the batch.
        batch_size: samples of the step, over all ranks.
        forward_step: the model's forward pass and its loss.

    Returns:
        A line with the largest difference.

    Raises:
        RankError: on every rank: how many gradients differ, by how much, and which of them is closest to the loss.
    """
    twins: list[Gradients] = []

    def serial() -> tuple[dict[str, float], list[tuple[str, tuple[int, ...]]], float, float]:
        twins.append(gradients(run, Mesh.serial(device=mesh.device), dataset, batch_size, forward_step))
        model = twins[0].model
        largest = max(grad.abs().max().item() for grad in model.whole_gradients().values())
        shapes = [(n, layout_of(p).unpadded_shape) for n, p in model.params.items()]
        return twins[0].losses, shapes, largest, twins[0].norm

    want_losses, logical, largest, want_norm = on_rank_zero(serial, mesh.world)
    losses, model, norm = gradients(run, mesh, dataset, batch_size, forward_step)
    norms = gather_objects(norm, mesh.world)
    differences = distances(model, twins[0].model if twins else None, logical, max(FLOOR * largest, 1e-300))
    everywhere = all_reduce(differences.clone(), mesh.world, "max").tolist()
    names = [name for name, _ in logical]
    lost = {n: abs(losses[n] - want) / max(abs(want), 1e-300) for n, want in want_losses.items()}
    wrong = [abs(of_rank - want_norm) / max(want_norm, 1e-300) for of_rank in norms]
    worst = max([*everywhere, *lost.values(), *wrong])
    if worst <= TOLERANCE:
        count = f"{len(names)} gradients, their norm and the loss of the first step are those of one process"
        return f"{count} (largest difference {worst:.0e}, in fp64)"
    bad = [k for k, distance in enumerate(everywhere) if distance > TOLERANCE]
    if not bad and max(lost.values(), default=0.0) <= TOLERANCE:
        raise _of_norm(norms, want_norm, run.optimizer.clip_grad)
    wrong_here = gather_objects([bool(differences[k] > TOLERANCE) for k in bad], mesh.world)
    raise _refusal(
        names, bad, everywhere, wrong_here, {n: (losses[n], want_losses[n]) for n in lost if lost[n] > TOLERANCE}
    )


def gradients(run: RunConfig, mesh: Mesh, dataset: Dataset, batch_size: int, forward_step: ForwardStep) -> Gradients:
    """Run the first batch through a new model in fp64, in the layout of `mesh`."""
    ddp = model_in_fp64(run, mesh)
    batches = microbatches(dataset, run.training.micro_batch_size, mesh, 0, mesh.device)
    count = batch_size // (run.training.micro_batch_size * mesh.dp.size)
    hooks, forward_backward_func = StepHooks(ddp, mesh), get_forward_backward_func(ddp)
    with hooks.passes(1.0):
        tokens, reports = forward_backward_func(forward_step, batches, ddp, count, lambda loss: loss)
    return finished(run, ddp, tokens, reports | hooks.reports())


def model_in_fp64(run: RunConfig, mesh: Mesh) -> DataParallel:
    """The model of a run at step 0 in fp64, with zero gradients: without dropout, by torch's functions, its constant
    parameters shaken, its weights those that the run's dtype can hold."""
    config = run.model.replace(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype="fp32",
        kernels="torch",
        attention_backend="auto",
        lora_base=None,
        fp32_residual_connection=False,
    )
    model = build_model_chunks(config, mesh, run.training.seed, spec_from_name(run.spec, config))
    shake(model, run.training.seed)
    model = model.to(run.model.dtype).double()
    return ready(run, model, mesh, torch.float64)


def ready(run: RunConfig, model: torch.nn.Module, mesh: Mesh, grad_dtype: torch.dtype) -> DataParallel:
    """The model in its data-parallel wrapper, frozen where the run freezes, its gradients zero."""
    freeze(model, run.optimizer, mesh)
    ddp = data_parallel(model, mesh, grad_dtype)
    ddp.zero_grad_buffer()
    return ddp


def finished(run: RunConfig, ddp: DataParallel, tokens: torch.Tensor, reports: dict[str, torch.Tensor]) -> Gradients:
    """Sum and divide the gradients of a batch, as a step does."""
    finalize_model_grads(ddp, ddp.mesh, tokens)
    params = main_params(run.optimizer, ddp, ddp.mesh, ddp.shards())
    norm, _, _ = look([(p, grad) for p in params if (grad := p.read_grad()) is not None], ddp.mesh).to_host()
    return Gradients(reduce_reports(reports, ddp).losses, ddp, norm)


def distances(
    model: DataParallel,
    twin: DataParallel | None,
    logical: list[tuple[str, tuple[int, ...]]],
    floor: float,
    note: Callable[[str, torch.Tensor, torch.Tensor], None] = lambda name, grad, twins: None,
) -> torch.Tensor:
    """max |g - G| / max |G| over this rank's part of every gradient, in fp64; 0 if it has no part of the parameter.

    Args:
        model: has the gradients g, finite or not; all ranks of its mesh call.
        twin: has the gradients G, on rank 0; None on other ranks.
        logical: (name, shape) of every parameter of the twin.
        floor: the smallest max |G| that counts.
        note: is given each parameter's name, this rank's g, and its part of G.
    """
    mesh, params, grads, off = model.mesh, model.params, model.whole_gradients(), []
    wanted = {} if twin is None else twin.whole_gradients()
    for name, shape in logical:
        want = torch.empty(shape, dtype=torch.float64, device=mesh.device)
        if twin is not None:
            want.copy_(gather_logical(wanted[name], layout_of(twin.params[name]), twin.mesh))
        broadcast(want, mesh.world)
        off.append(torch.zeros((), dtype=torch.float64, device=mesh.device))
        if name in params:
            scale, part = want.abs().max().clamp(min=floor), part_of_logical(want, layout_of(params[name]))
            if part.numel():
                off[-1] = torch.nan_to_num((grads[name] - part).abs().max() / scale, nan=torch.inf)
                note(name, grads[name], part)
    return torch.stack(off)


@torch.no_grad()
def shake(model: torch.nn.Module, seed: int) -> None:
    """Add random numbers to parameters with constant initial values, norms and biases; the same in every layout."""
    for name, param in logical_parameters(model):
        layout = layout_of(param)
        if layout.init.std == 0.0:
            noise = dataclasses.replace(layout, init=Init(std=SHAKE))
            param.copy_(param.float() + draw_part(f"{name} shaken", noise, seed).to(param.device))


def _of_norm(norms: list[float], twin: float, clip_grad: float) -> RankError:
    """The error if every gradient is right, and a rank's gradient norm is not."""
    held = ranks_by_value([f"{norm:.9g}" for norm in norms], range(len(norms)))
    factor = f": {clip_coefficient(twin, clip_grad):.6g} clips it" if clip_grad > 0 else ""
    return RankError(
        "the first step: the norm of the gradient is "
        + ", ".join(f"{norm} on {named(ranks)}" for norm, ranks in held.items())
        + f", and {twin:.9g} in one process{factor}; the gradients are those of one process",
        fix="look for an element that no rank counts or several do, or for a sum over other ranks than the world",
    )


def _refusal(
    names: list[str],
    bad: list[int],
    distances: list[float],
    held: list[list[bool]],
    losses: dict[str, tuple[float, float]],
) -> RankError:
    what = [f"{name} is {here:.9g} and {twin:.9g} in one process" for name, (here, twin) in losses.items()]
    where = ""
    if bad:
        ranks = ranges(rank for rank, wrong in enumerate(held) if wrong[-1])
        what.append(
            f"{len(bad)} of {len(names)} gradients are not those of one process; seen from the loss, the first is "
            f"{names[bad[-1]]!r}, off by {distances[bad[-1]]:.1e} of its largest element"
        )
        where = (
            f"ranks {ranks}; also {', '.join(names[k] for k in reversed(bad[-6:-1]))}" if bad[:-1] else f"ranks {ranks}"
        )
    return RankError(
        "the first step: " + "; ".join(what),
        where=where,
        fix="look for a sum that is missing, made twice or over the wrong ranks, "
        + ("in the forward pass" if losses else "in the backward pass between that tensor and the loss")
        + "; `minimegatron compare` with the same flags names the first tensor that differs",
    )


class ReplicaCheck(Observer):
    """Compares every parameter with its copies on other ranks, and the numbers with which each rank has updated its
    part.

    Args:
        model: its parameters are compared.
        mesh: its layout.
        interval: steps between comparisons; None for no comparisons.
    """

    def __init__(self, model: DataParallel, mesh: Mesh, interval: int | None) -> None:
        self.model, self.mesh, self.interval = model, mesh, interval
        self._report: StepReport | None = None  # of the last good step

    def after_step(self, step: Step) -> None:
        """Compare if a comparison is due.

        Raises:
            RankError: copies differ.
        """
        self._report = step.report or self._report
        if self.interval and step.iteration % self.interval == 0:
            self.check()

    def check(self) -> None:
        """Compare what each rank has decided by itself, which would explain the rest, then the copies."""
        world = self.mesh.world
        if self._report is not None:
            device = self.mesh.device
            decided = {
                n: torch.tensor(v, dtype=torch.float64, device=device) for n, v in self._report.decided().items()
            }
            check_copies({f"the {name} of the step": (value, [world]) for name, value in decided.items()}, world)
        with self.model.whole_weights():
            params = logical_parameters(self.model)
            check_copies({n: (p, copy_axes(layout_of(p), self.mesh)) for n, p in params}, world)
