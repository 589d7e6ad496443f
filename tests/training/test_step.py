"""A step does not depend on how its batch is cut, and a number that is not finite moves nothing, on any rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from minimegatron.comm import agree
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.errors import NumericsError
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.scaler import loss_divisor
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.training import reports as module
from minimegatron.training.datasets import to_device
from minimegatron.training.reports import StepReport, reduce_reports
from minimegatron.training.step import (
    ForwardStep,
    Loss,
    LossFunc,
    StepOptions,
    forward_step,
    loss_func,
    train_step,
)
from tests.axes import SP, TP
from tests.thorough import SLOW, mostly_thorough
from tests.twin import Case, accumulate, distance, microbatch, parallel_model
from tests.waits import waits

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


@pytest.mark.parametrize(
    "layout, dp, accumulation, empty_rank, optimizer",
    mostly_thorough(
        [({}, 2, 3, 1, ADAM), ({TP: 2, SP: True}, 2, 2, None, SGD), ({TP: 2}, 2, 1, 0, ADAM), ({}, 4, 1, 2, SGD)],
        [0, 1, 2],
        [2],
    ),
    ids=["dp2", "tp2 sp dp2", "tp2 dp2", "dp4"],
)  # fmt: skip
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
    assert done.reports == [] and "all labels of this batch are masked" in done.error
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


@pytest.mark.parametrize(
    "kind, layout", mostly_thorough([("loss", {}), ("gradient", {TP: 2}), ("report", {})], [0, 1], [0]), ids=str
)
def test_one_ranks_nan_stops_all_ranks_before_anything_moves(ranks, kind, layout):
    clean = ranks(2).run(on_ranks, Case(layout), ADAM, steps=1)
    for trained, one_step in zip(ranks(2).run(on_ranks, Case(layout), ADAM, kind), clean, strict=True):
        assert len(trained.reports) == 1 and same_weights(trained.after, one_step.after)
        assert "lm loss is nan" in trained.error or kind == "gradient" and "hold NaN or infinity" in trained.error
        assert "rank 1" in trained.error or kind == "gradient"


@pytest.mark.parametrize("kind", mostly_thorough(["loss", "gradient", "report"], [0]))
def test_with_the_check_off_all_ranks_skip_that_step_alone(ranks, kind):
    optimizer = {**ADAM, "check_for_nan_in_loss_and_grad": False, "lr_decay_style": "linear"}
    steps = 3 if kind == "report" else 2  # a NaN in what is reported alone is no reason to skip
    clean = ranks(2).run(on_ranks, Case(), optimizer, steps=steps)
    for trained, expected in zip(ranks(2).run(on_ranks, Case(), optimizer, kind), clean, strict=True):
        assert [r.skipped for r in trained.reports] == [False, kind != "report", False]
        assert math.isnan(trained.reports[1].losses["lm loss"]) == (kind != "gradient")
        assert trained.lr == expected.lr


# ------------------------------------------------------------------------------------------------ fp16

FP16 = Case(model={"params_dtype": "fp16"}, seq_length=64, micro_batch_size=4)


def test_the_divisor_changes_exponents_and_nothing_else():
    a, b = (run_steps(Mesh.serial(), Case(accumulation=2), ADAM, [0], divisor=divisor) for divisor in (1.0, 32.0))
    assert a.reports == b.reports and same_weights(a.after, b.after)


EXPERTS = {
    "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1, "mtp_num_layers": 1,
}  # fmt: skip


def test_the_divisor_reaches_penalties_depths_and_gradients_of_experts():
    case = Case(model=EXPERTS, accumulation=2)
    a, b = (run_steps(Mesh.serial(), case, ADAM, [0], divisor=divisor) for divisor in (1.0, 32.0))
    assert a.reports == b.reports and same_weights(a.after, b.after)
    assert all(load.balancing_loss > 0 for r in a.reports for load in r.experts) and "mtp_1 loss" in a.reports[0].losses


@SLOW
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


# ------------------------------------------------------------------------------------ tokens that count for less than 1


def test_a_common_factor_of_all_weights_changes_nothing(monkeypatch):
    case, mesh, found = Case(accumulation=2), Mesh.serial(), []
    for factor in (1.0, 1e-4):

        def weighted(case: Case, rank: int, index: int, factor: float = factor) -> dict[str, torch.Tensor]:
            batch = microbatch(case, rank, index)
            return {**batch, "loss_mask": factor * batch["loss_mask"]}

        monkeypatch.setattr("tests.twin.microbatch", weighted)
        ddp = parallel_model(case, mesh)
        found.append((accumulate(ddp, case, mesh), ddp.grad_buffers[0].data.clone()))
    assert abs(found[1][0] / found[0][0] - 1) < 1e-6
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- biases of experts


CONFIG = TransformerConfig(
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    num_experts=4,
    moe_ffn_hidden_size=8,
    add_bias_linear=False,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


@pytest.mark.parametrize("broken", ["nothing", "loss", "gradient"])
def test_a_step_that_is_refused_moves_no_bias(broken):
    model = DistributedDataParallel(build_model(CONFIG, Mesh.serial(), 0), Mesh.serial())
    optimizer = build_optimizer(OptimizerConfig(), model, Mesh.serial())
    schedule = Schedule.from_config(OptimizerConfig(), global_batch_size=2, train_iters=4)

    def forward(batches, model):
        output, loss = forward_step(batches, model)
        if broken == "gradient":
            output.register_hook(lambda grad: grad * math.nan)
        return output * math.nan if broken == "loss" else output, loss

    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(2, 8)}

    def step() -> None:
        scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule)
        train_step(forward, iter([batch]), model, optimizer, scheduler, num_microbatches=1)

    if broken == "nothing":
        step()
    else:
        with pytest.raises(NumericsError):
            step()
    biases = [bias for name, bias in model.named_parameters() if name.endswith("expert_bias")]
    assert len(biases) == 2 and all(bool(bias.any()) == (broken == "nothing") for bias in biases)


# -------------------------------------------------------------------------------------------------- what the host reads


MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "add_bias_linear": False}


def waits_of_a_step(case: Case, **optimizer: Any) -> list[str]:
    mesh, config = Mesh.serial(), OptimizerConfig(**optimizer)
    ddp = parallel_model(case, mesh)
    opt = build_optimizer(config, ddp, mesh)
    scheduler = OptimizerParamScheduler(
        opt.param_groups, Schedule.from_config(config, global_batch_size=1, train_iters=9)
    )
    for _ in range(2):  # the first one makes tables
        data = iter([microbatch(case, 0, i) for i in range(case.accumulation)])
        with waits() as found:
            train_step(forward_step, data, ddp, opt, scheduler, num_microbatches=case.accumulation)
    return found


@pytest.mark.parametrize("model", [{}, {"params_dtype": "bf16"}, {"params_dtype": "fp16"}], ids=str)
def test_a_step_reads_its_losses_and_its_norm(model):
    assert waits_of_a_step(Case(model=model, accumulation=2)) == ["tolist", "tolist"]
    assert waits_of_a_step(Case(model=model), clip_grad=0.0, log_num_zeros_in_grad=True) == ["tolist", "tolist"]


@pytest.mark.slow
def test_a_count_beyond_what_fp32_counts():
    mask = torch.ones(1, 2**24 + 1)
    loss, count, reports = loss_func(mask, mask)
    assert count == 2**24 + 1 and reports["lm loss"][1] == 2**24 + 1


def test_batches_go_to_a_gpu_from_pinned_memory_without_waiting(monkeypatch):
    done: list[tuple[str, int, Any]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: done.append(("pin", t.data_ptr(), None)) or t.clone())
    monkeypatch.setattr(torch.Tensor, "to", lambda t, d, **how: done.append(("copy", t.data_ptr(), (d.type, how))) or t)
    batch = {"tokens": torch.arange(6), "loss_mask": torch.ones(6)}
    moved = to_device(batch, torch.device("cuda"))
    assert moved.keys() == batch.keys() and all(torch.equal(moved[n], batch[n]) for n in batch)
    assert [what for what, *_ in done] == ["pin", "copy"] * 2
    for (_, pageable, _), (_, copied, how) in zip(done[::2], done[1::2], strict=True):
        assert copied != pageable and how == ("cuda", {"non_blocking": True})


def in_a_pipeline(rank: int, world: int) -> list[Any]:
    """Four calls: of the last stage's names, of the same, of others, of these."""
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=2))
    model = DataParallel(torch.nn.Identity(), mesh)
    asked: list[Any] = []
    real, found = agree.gather_objects, []
    module.gather_objects = lambda item, axis: asked.append(item) or real(item, axis)
    try:
        for call in ({"a": 2.0}, {"a": 4.0}, {"b": 6.0, "a": 8.0}, {"b": 1.0, "a": 3.0}):
            mine = {n: torch.tensor([v, 2.0], dtype=torch.float64) for n, v in call.items()} if mesh.pp.rank else {}
            totals = reduce_reports(
                mine, model, hook_tables=[torch.tensor([7.0])], asks_to_stop=call == {"a": 4.0} and rank == 0
            )
            found.append((totals.losses, totals.stop, totals.hook_tables[0][0], len(asked)))
    finally:
        module.gather_objects = real
    return found


def test_the_last_stage_says_the_names_once_and_again_when_they_change(ranks):
    for found in ranks(2).run(in_a_pipeline):
        assert [means for means, *_ in found] == [{"a": 1.0}, {"a": 2.0}, {"b": 3.0, "a": 4.0}, {"b": 0.5, "a": 1.5}]
        assert [(stop, beside) for _, stop, beside, _ in found] == [(False, 7), (True, 7), (False, 7), (False, 7)]
        assert [asked for *_, asked in found] == [1, 1, 2, 2]
