"""A step does not depend on how its batch is cut, and a number that is not finite moves nothing, on any rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.errors import NumericsError
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.scaler import loss_divisor
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.training.observers.evaluation import evaluate
from minimegatron.training.reports import StepReport
from minimegatron.training.step import (
    ForwardStep,
    Loss,
    LossFunc,
    StepOptions,
    forward_step,
    loss_func,
    train_step,
)
from tests.twin import Case, distance, microbatch, parallel_model

TP, SP = "tensor_model_parallel_size", "sequence_parallel"
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.3, "clip_grad": 0.0, "lr_decay_style": "constant"}
ADAM = {"optimizer": "adam", "lr": 3e-3, "clip_grad": 0.5, "lr_decay_style": "constant", "weight_decay": 0.1}


@dataclasses.dataclass
class Trained:
    """What some steps did: reports, and the logical weights before and after."""

    reports: list[StepReport]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    lr: float = 0.0
    error: str = ""


def batches(case: Case, replicas: list[int], steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The microbatches of these dp ranks, one rank after the other, step by step."""
    for step in range(steps):
        for d in replicas:
            for i in range(case.accumulation):
                yield microbatch(case, d, 1000 * step + i)


def logical(ddp: DistributedDataParallel, mesh: Mesh) -> dict[str, torch.Tensor]:
    return {n: gather_logical(p.detach(), layout_of(p), mesh).clone() for n, p in logical_parameters(ddp)}


class Poison:
    """A forward pass that makes one number NaN, on one rank, in one microbatch.

    Args:
        kind: what: "loss" (and so its gradient), "gradient" alone, or "report" alone.
        here: whether this rank is the one.
        at: which microbatch, from 0.
    """

    def __init__(self, kind: str, here: bool, at: int = 1) -> None:
        self.kind, self.here, self.at, self.calls = kind, here, at, 0

    def __call__(self, data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, LossFunc]:
        output, summed = forward_step(data, model)
        self.calls += 1
        if not self.here or self.calls - 1 != self.at:
            return output, summed
        if self.kind == "gradient":
            output.register_hook(lambda grad: grad * math.nan)
        if self.kind == "loss":
            output = output * math.nan
        return output, self.spoil(summed) if self.kind == "report" else summed

    @staticmethod
    def spoil(summed: LossFunc) -> LossFunc:
        def wrapped(output: torch.Tensor) -> Loss:
            loss, count, reports = summed(output)
            return loss, count, {name: pair * math.nan for name, pair in reports.items()}

        return wrapped


def run_steps(
    mesh: Mesh,
    case: Case,
    optimizer: dict[str, Any],
    replicas: list[int],
    *,
    steps: int = 3,
    divisor: float = 1.0,
    forward: ForwardStep = forward_step,
) -> Trained:
    ddp = parallel_model(case, mesh)
    config = OptimizerConfig(**optimizer)
    opt = build_optimizer(config, ddp, mesh)
    schedule = Schedule.from_config(config, global_batch_size=1, train_iters=100)
    scheduler = OptimizerParamScheduler(opt.param_groups, schedule)
    data, per_step = batches(case, replicas, steps), case.accumulation * len(replicas)
    done = Trained([], logical(ddp, mesh), {})
    try:
        for _ in range(steps):
            options = StepOptions(loss_divisor=divisor)
            report = train_step(forward, data, ddp, opt, scheduler, per_step, options)
            done.reports.append(report)
    except NumericsError as error:
        done.error = str(error)
    done.after, done.lr = logical(ddp, mesh), scheduler.lr
    return done


def on_ranks(rank: int, world: int, case: Case, optimizer: dict[str, Any], poison: str = "", **options: Any) -> Trained:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    forward = Poison(poison, here=rank == world - 1) if poison else forward_step
    return run_steps(mesh, case, optimizer, [mesh.dp.rank], forward=forward, **options)


def difference(a: Trained, b: Trained) -> float:
    """Largest relative difference of losses, gradient norms and weights."""
    pairs = list(zip(a.reports, b.reports, strict=True))
    numbers = [abs(x.losses["lm loss"] - y.losses["lm loss"]) / y.losses["lm loss"] for x, y in pairs]
    numbers += [abs(x.grad_norm - y.grad_norm) / y.grad_norm for x, y in pairs]
    return max(*numbers, *(distance(a.after[n], b.after[n]) for n in b.after))


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in b)


# ------------------------------------------------------------------------------------------------ how the batch is cut


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "layout, dp, accumulation, empty_rank",
    [({}, 2, 1, None), ({}, 2, 3, 1), ({TP: 2, SP: True}, 2, 2, None), ({TP: 2}, 2, 1, 0), ({}, 4, 1, 2)],
    ids=str,
)
def test_any_layout_takes_the_same_steps_as_one_process(ranks, optimizer, layout, dp, accumulation, empty_rank):
    """Counts of tokens differ between all microbatches, and on one rank they may be 0."""
    case = Case(layout, accumulation=accumulation, empty_rank=empty_rank, double=True)
    serial = run_steps(Mesh.serial(), dataclasses.replace(case, layout={}), optimizer, list(range(dp)))
    counts = [r.num_tokens for r in serial.reports]
    assert len(set(counts)) > 1
    for trained in ranks(dp * layout.get(TP, 1)).run(on_ranks, case, optimizer):
        assert [r.num_tokens for r in trained.reports] == counts
        assert difference(trained, serial) < 1e-9


def test_steps_are_those_of_a_plain_loop():
    """Against torch alone: one loss over the whole batch, divided once, plain gradient descent."""
    case = Case(accumulation=3, double=True)
    got = run_steps(Mesh.serial(), case, {**SGD, "weight_decay": 0.0}, [0], steps=2)
    model = parallel_model(case, Mesh.serial()).module
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    data = batches(case, [0], 2)
    for report in got.reports:
        taken = [next(data) for _ in range(case.accumulation)]
        each = [torch.func.functional_call(model, weights, (b["tokens"], None, b["labels"])) for b in taken]
        masks = [b["loss_mask"] for b in taken]
        loss = sum((x * m).sum() for x, m in zip(each, masks, strict=True)) / sum(m.sum() for m in masks)
        grads = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.cat([g.flatten() for g in grads]).norm().item()
        assert report.losses["lm loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert report.grad_norm == pytest.approx(norm, rel=1e-9)
        weights = {n: (p - 0.3 * g).detach().requires_grad_() for (n, p), g in zip(weights.items(), grads, strict=True)}
    assert all(distance(got.after[n], p.detach()[: len(got.after[n])]) < 1e-9 for n, p in weights.items())


def test_a_batch_in_which_nothing_counts_moves_nothing():
    done = run_steps(Mesh.serial(), Case(empty_rank=0), {**SGD, "weight_decay": 0.1}, [0], steps=1)
    assert done.reports == [] and "none of the step's labels counts" in done.error
    assert same_weights(done.before, done.after), "nor is it made smaller by weight decay"


def test_a_loss_of_ones_own_reports_its_own_names():
    def own(mask: torch.Tensor, output: torch.Tensor) -> Loss:
        loss, count, reports = loss_func(mask, output)
        worst = torch.stack([(output.detach() * mask).max(), torch.ones(())])
        return 2 * loss, count, {**reports, "worst token": worst}

    def forward(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, LossFunc]:
        batch = next(data)
        return model(batch["tokens"], None, batch["labels"]), partial(own, batch["loss_mask"])

    case = Case(accumulation=2, double=True)
    plain, doubled = (run_steps(Mesh.serial(), case, SGD, [0], steps=1, forward=f) for f in (forward_step, forward))
    assert doubled.reports[0].grad_norm == pytest.approx(2 * plain.reports[0].grad_norm, rel=1e-9)
    assert doubled.reports[0].losses["worst token"] > doubled.reports[0].losses["lm loss"]


# ------------------------------------------------------------------------------------------------ not finite


@pytest.mark.parametrize("layout", [{}, {TP: 2}], ids=["dp", "tp"])
@pytest.mark.parametrize("kind", ["loss", "gradient", "report"])
def test_one_ranks_nan_stops_all_ranks_before_anything_moves(ranks, kind, layout):
    clean = ranks(2).run(on_ranks, Case(layout), ADAM, steps=1)
    for trained, one_step in zip(ranks(2).run(on_ranks, Case(layout), ADAM, kind), clean, strict=True):
        assert len(trained.reports) == 1 and same_weights(trained.after, one_step.after)
        assert "lm loss is nan" in trained.error or kind == "gradient" and "hold NaN or infinity" in trained.error
        assert "rank 1" in trained.error or kind == "gradient"


@pytest.mark.parametrize("kind", ["loss", "gradient", "report"])
def test_with_the_check_off_all_ranks_skip_that_step_alone(ranks, kind):
    optimizer = {**ADAM, "check_for_nan_in_loss_and_grad": False, "lr_decay_style": "linear"}
    steps = 3 if kind == "report" else 2  # a NaN in what is reported alone is no reason to skip
    clean = ranks(2).run(on_ranks, Case(), optimizer, steps=steps)
    for trained, expected in zip(ranks(2).run(on_ranks, Case(), optimizer, kind), clean, strict=True):
        assert [r.skipped for r in trained.reports] == [False, kind != "report", False]
        assert math.isnan(trained.reports[1].losses["lm loss"]) == (kind != "gradient")
        assert trained.lr == expected.lr


def test_the_error_names_the_rank_and_is_the_same_everywhere(ranks):
    """The error of one rank is everybody's, word for word, so that a launcher shows it once."""
    errors = [trained.error for trained in ranks(2).run(on_ranks, Case(), ADAM, "loss")]
    assert errors[0] == errors[1] and "where: rank 1" in errors[0] and "fix:" in errors[0]


# ------------------------------------------------------------------------------------------------ fp16

FP16 = Case(model={"params_dtype": "fp16"}, seq_length=64, micro_batch_size=4)


def test_the_divisor_changes_exponents_and_nothing_else():
    a, b = (run_steps(Mesh.serial(), Case(accumulation=2), ADAM, [0], divisor=divisor) for divisor in (1.0, 32.0))
    assert a.reports == b.reports and same_weights(a.after, b.after)


EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "mtp_num_layers": 1,
}


def test_the_divisor_reaches_penalties_depths_and_gradients_of_experts():
    case = Case(model=EXPERTS, accumulation=2)
    a, b = (run_steps(Mesh.serial(), case, ADAM, [0], divisor=divisor) for divisor in (1.0, 32.0))
    assert a.reports == b.reports and same_weights(a.after, b.after)
    assert all(load.balancing_loss > 0 for r in a.reports for load in r.experts) and "mtp_1 loss" in a.reports[0].losses


def test_experts_that_are_cut_take_the_steps_of_one_process(ranks):
    """Copies are on other ranks than those of the rest: other sums, other counts in the norm, one division."""
    layout = {TP: 2, SP: True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    case = Case(layout, EXPERTS, accumulation=2, double=True)
    serial = run_steps(Mesh.serial(), dataclasses.replace(case, layout={}), SGD, [0, 1], divisor=4.0)
    for trained in ranks(4).run(on_ranks, case, SGD, divisor=4.0):
        assert difference(trained, serial) < 1e-9


def test_fp16_with_the_loss_scale_of_a_mean():
    """2^16 suits a mean loss. A sum over 256 tokens overflows; with the divisor it does not, and trains as fp32."""
    divisor = loss_divisor(torch.float16, 4 * 64)
    assert divisor == 256.0 and loss_divisor(torch.bfloat16, 256) == loss_divisor(torch.float32, 256) == 1.0
    optimizer = {**SGD, "loss_scale": 2.0**16, "lr": 0.05}
    with_divisor = run_steps(Mesh.serial(), FP16, optimizer, [0], divisor=divisor)
    without = run_steps(Mesh.serial(), FP16, optimizer, [0])
    fp32 = run_steps(Mesh.serial(), dataclasses.replace(FP16, model={}), {**SGD, "lr": 0.05}, [0])
    assert all(r.skipped for r in without.reports) and not any(r.skipped for r in with_divisor.reports)
    assert difference(with_divisor, fp32) < 0.02
    assert [r.loss_scale for r in with_divisor.reports] == [2.0**16] * 3


def test_a_skipped_fp16_step_does_not_move_the_schedule():
    optimizer = {**SGD, "lr_decay_style": "linear", "initial_loss_scale": 2.0**40, "hysteresis": 1}
    done = run_steps(Mesh.serial(), FP16, optimizer, [0], steps=2, divisor=256.0)
    assert [r.skipped for r in done.reports] == [True, True] and [r.loss_scale for r in done.reports] == [
        2.0**40,
        2.0**39,
    ]
    assert done.lr == 0.3 and done.reports[0].grad_norm is None and same_weights(done.before, done.after)


# ------------------------------------------------------------------------------------------------ evaluation


def evaluated(rank: int, world: int, case: Case) -> tuple[dict[str, float], bool]:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    ddp = parallel_model(case, mesh)
    ddp.module.decoder.eval()
    found = evaluate(forward_step, batches(case, [mesh.dp.rank], 1), ddp, case.accumulation)
    modes_kept = ddp.training and not ddp.module.decoder.training
    return found, modes_kept and not any(p.grad is not None for p in ddp.parameters())


def test_evaluation_is_the_mean_over_all_tokens_and_leaves_no_trace(ranks):
    case = Case(accumulation=3, double=True)
    model = parallel_model(case, Mesh.serial())
    data = list(batches(case, [0, 1], 1))
    with torch.no_grad():
        total = sum((model(b["tokens"], None, b["labels"]) * b["loss_mask"]).sum() for b in data)
    mean = (total / sum(b["loss_mask"].sum() for b in data)).item()
    for losses, untouched in ranks(2).run(evaluated, case):
        assert losses["lm loss"] == pytest.approx(mean, rel=1e-9) and untouched


def test_the_label_of_a_token_that_does_not_count_may_be_no_word():
    """-100, as elsewhere: the same sum and gradients as with any label; where it counts the loss is infinite."""
    case = Case()
    model = parallel_model(case, Mesh.serial())
    batch = {name: tensor.clone() for name, tensor in microbatch(case, 0, 0).items()}
    masked = (batch["loss_mask"] == 0).nonzero()[0].tolist()
    found = []
    for label in (0, -100):
        batch["labels"][tuple(masked)] = label
        output, loss_of = forward_step(iter([batch]), model)
        loss = loss_of(output)[0]
        model.zero_grad_buffer()
        loss.backward()
        found.append([loss, *(p.main_grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found)) and all(each.isfinite().all() for each in found[1])
    batch["loss_mask"][tuple(masked)] = 1.0
    output, loss_of = forward_step(iter([batch]), model)
    assert loss_of(output)[0].isinf()
