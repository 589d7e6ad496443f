"""A task is the same in every layout, however its batch is cut, and after a resume in the middle of anything."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint import commit
from minimegatron.checkpoint.commit import complete
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.errors import ConfigError
from minimegatron.inference.generate import generate
from minimegatron.posttraining.tasks import TASKS
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.trainer import Trainer
from tests.thorough import mostly_thorough

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --tokenizer-type ByteLevelTokenizer "
    "--normalization RMSNorm --lr 3e-3 --lr-decay-style constant --init-method-std 0.1 "
)
ANSWERS = (
    "--environment format --grpo-prompts-per-step 4 --grpo-group-size 4 --max-completion-length 6 "
    "--global-batch-size 8 --train-iters 3 "
)
WORDS = {
    "sft": "--global-batch-size 8 --train-iters 2 --split 100 --sequence-packing",
    "dpo": "--global-batch-size 8 --train-iters 2 --split 100 --sequence-packing --label-smoothing 0.1",
    "reward": "--global-batch-size 8 --train-iters 2 --split 100 --center-rewards-coefficient 0.1",
    "ppo": f"{ANSWERS} --grpo-kl-beta 0.1 --grpo-kl-in reward --ppo-lambda 0.9",
    "grpo": f"{ANSWERS} --grpo-kl-beta 0.1 --grpo-entropy-term-weight 0.01 --rl-importance-sampling-mode token_mask",
}
FORMS = {
    "grpo": [
        "--grpo-loss-type grpo --importance-sampling-level sequence",
        "--grpo-loss-type dr_grpo --grpo-iterations 2",
    ],
    "dpo": ["--dpo-loss-type ipo"],
}


def trainer_of(task: str, line: str, world: int = 1) -> Trainer:
    return build_trainer(parse_args(shlex.split(f"{MODEL}{line}"), world, task=task), task=TASKS[task], quiet=True)


def curve(rank: int, world: int, task: str, line: str) -> list[dict[str, float]]:
    """What each step reports."""
    trainer = trainer_of(task, line, world)
    try:
        trainer.train()
    finally:
        trainer.close()
    return [report.losses | {"norm": float(report.grad_norm or 0)} for report in trainer.history]


def near(found: list[dict[str, float]], want: list[dict[str, float]], tolerance: float = 2e-4) -> None:
    assert len(found) == len(want)
    for step, (one, other) in enumerate(zip(found, want, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            tie = step == 0 and name == "chosen preferred" and "dpo loss" in other  # all margins are 0, to rounding
            if "gap" not in name and not tie:  # rounding alone
                assert one[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"{name} of step {step}"


TP = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = [
    (2, f"{TP} --micro-batch-size 4"),
    (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2 --rl-inference-tensor-model-parallel-size 2"),
    (2, "--context-parallel-size 2 --micro-batch-size 4"),
    (2, "--micro-batch-size 2 --rl-inference-pipeline-model-parallel-size 2"),
    (2, "--micro-batch-size 4 --data-parallel-sharding-strategy optim_grads_params"),
    (1, "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    (4, f"{TP} --context-parallel-size 2 --micro-batch-size 2"),
    (4, "--pipeline-model-parallel-size 2 --micro-batch-size 1 --data-parallel-sharding-strategy optim"),
]
CASES = [(task, form, *layout) for task in WORDS for form in ["", *FORMS.get(task, [])] for layout in LAYOUTS]


ORDINARY = {
    "sft": "context",
    "dpo": "context|optim_grads",
    "reward": "tensor",
    "ppo": "pipeline",
    "grpo": "tensor|pipe",
}


def is_ordinary(case: Any) -> bool:
    task, form, world, layout = case
    return (
        world == 2
        and not form
        and re.match(f"--({ORDINARY[task]})", re.sub("^--micro-batch-size . ", "", layout)) is not None
    )


@pytest.mark.parametrize(("task", "form", "world", "layout"), mostly_thorough(CASES, is_ordinary))
def test_every_layout_is_the_serial_one(
    ranks: Any, files: dict[str, str], task: str, form: str, world: int, layout: str
) -> None:
    line = f"{WORDS[task]} {files[task]} {form}"
    if task not in ("grpo", "ppo"):
        layout = re.sub("--rl-inference-\\S+ 2", "", layout)
    serial = curve(0, 1, task, f"{line} --micro-batch-size 8")
    words = f"{line} {layout}"
    for found in ranks(world).run(curve, task, words) if world > 1 else [curve(0, 1, task, words)]:
        near(found, serial)


@pytest.mark.parametrize("task", WORDS)
def test_a_resumed_run_goes_on_to_the_bit(files: dict[str, str], tmp_path: Path, task: str) -> None:
    """GRPO stops in the middle of a rollout: its answers are those of weights that are gone."""
    check_resumed(
        task, f"{WORDS[task]} {files[task]} --micro-batch-size 4 --train-iters 3 --lr-decay-iters 3", tmp_path
    )


def check_resumed(task: str, line: str, tmp_path: Path, begins: str = "") -> None:
    """A run of three steps is the same, in every number, if it stops after the first and goes on.

    Args:
        begins: flags of a run that does not go on from a checkpoint of its own.
    """
    line += f" --save {tmp_path}"
    curves = [curve(0, 1, task, f"{line}/{n} {begins}") for n in ("whole", "cut --exit-interval 1")]
    curves.append(curve(0, 1, task, f"{line}/cut --load {tmp_path}/cut"))
    assert curves[1] + curves[2] == curves[0]
    whole, cut = (
        CheckpointFiles(commit.folder_of(tmp_path / n, 3), complete(tmp_path / n)[3]) for n in ("whole", "cut")
    )
    assert whole.manifest.tensors.keys() == cut.manifest.tensors.keys()
    for name in whole.manifest.tensors:
        assert torch.equal(whole.read(name), cut.read(name)), name


def evaluated(rank: int, world: int, line: str) -> tuple[list[dict[str, float]], list[str], float]:
    """(what each step reports, lines of evaluations, the greedy reward of the last weights by another way)."""
    run = parse_args(shlex.split(f"{MODEL}{WORDS['grpo']} {line}"), world, task="grpo")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = build_trainer(run, task=TASKS["grpo"])
        try:
            trainer.train()
            model, task = trainer.model.module.eval(), trainer.task
            rewards = []
            for problem in task.environment.problems(held_out=True) if world == 1 else ():
                prompt = trainer.data.tokenizer.tokenize(problem.prompt)
                made = generate(model, [prompt], 6, stop_ids=[trainer.data.tokenizer.eod], max_model_len=33)[0]
                text = trainer.data.tokenizer.detokenize(made.tokens[: len(made.tokens) - made.stopped])
                rewards.append(task.environment.turn(problem, [text]).reward)
        finally:
            trainer.close()
    said = [line for line in out.getvalue().splitlines() if "greedy reward" in line]
    return [report.losses for report in trainer.history], said, sum(rewards) / max(1, len(rewards))


def test_reinforcement_learning_is_evaluated_by_the_greedy_reward_of_problems_held_out(
    ranks: Any, tmp_path: Path
) -> None:
    """It leaves no trace in the training, and the checkpoint with the largest reward stays."""
    line = "--environment tests.posttraining.environments:Letters --micro-batch-size 4 --lr 3e-2 --save-interval 1 "
    line += f"--save {tmp_path}"
    evaluates = "--eval-interval 1 --eval-iters 1 --save-keep-last 1 --save-keep-best"
    plain, none, _ = evaluated(0, 1, f"{line}/plain")
    curve, said, reward = evaluated(0, 1, f"{line}/best {evaluates}")
    assert curve == plain and not none and len(said) == 3
    values = [float(line.split("greedy reward value: ")[1].split()[0]) for line in said]
    assert values[-1] == pytest.approx(reward, rel=1e-5)
    kept = complete(tmp_path / "best")
    best = 1 + values.index(max(values))
    assert set(kept) == {best, 3} and len(set(values)) == 3
    assert kept[best].state["validation_loss"] == pytest.approx(-max(values), rel=1e-5)
    layout = "--tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 2"
    for _, found, _ in ranks(2).run(evaluated, f"{line}/tp {evaluates} {layout}"):
        assert not found or [text.split("|")[1] for text in found] == [text.split("|")[1] for text in said]
    with pytest.raises(ConfigError, match="it holds no problem out"):
        trainer_of("grpo", f"{ANSWERS} --environment guess --micro-batch-size 4 --eval-interval 1")


def first_step(rank: int, world: int, task: str, line: str) -> None:
    trainer = trainer_of(task, f"{line} --check-first-step --train-iters 1", world)
    trainer.train()
    trainer.close()


@pytest.mark.parametrize("task", ["sft", "dpo", "reward"])
def test_every_gradient_of_the_first_step_is_that_of_one_process(ranks: Any, files: dict[str, str], task: str) -> None:
    """In fp64, with weights that are not as they begin; it raises where one differs."""
    ranks(2).run(first_step, task, f"{WORDS[task]} {files[task]} --micro-batch-size 4 {TP}")


def test_a_row_of_which_nothing_counts_changes_nothing(files: dict[str, str]) -> None:
    """A microbatch may have no token that counts; its sums are 0, and no mean of it exists to be NaN."""
    trainer = trainer_of("sft", f"{WORDS['sft']} {files['sft']} --micro-batch-size 1 --train-iters 1")
    batches = list(trainer._batches(trainer.train_set, 0))[:8]
    batches[3]["loss_mask"].zero_()
    total, count = 0.0, 0.0
    for batch in batches:
        inputs = (batch["tokens"], batch["position_ids"], batch["labels"])
        losses = trainer.model(*inputs, document_ids=batch["document_ids"]).detach()
        total, count = total + float((losses * batch["loss_mask"]).sum()), count + float(batch["loss_mask"].sum())
    trainer._batches = lambda dataset, consumed: iter(batches)  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    assert trainer.history[0].losses["lm loss"] == pytest.approx(total / count, rel=1e-6)
    assert math.isfinite(trainer.history[0].grad_norm or math.nan)


def test_prompts_have_no_gradient_and_the_first_and_the_stop_token_have_one(files: dict[str, str]) -> None:
    trainer = trainer_of("sft", f"{WORDS['sft']} {files['sft']} --micro-batch-size 8")
    batch = next(trainer._batches(trainer.train_set, 0))
    inputs = (batch["tokens"], batch["position_ids"])
    logits = trainer.model(*inputs, document_ids=batch["document_ids"])[..., :258].detach().requires_grad_()
    flat, labels = logits.transpose(0, 1).flatten(0, 1), batch["labels"].flatten()
    loss = torch.nn.functional.cross_entropy(flat, labels, reduction="none")
    ours = trainer.model(*inputs, batch["labels"], document_ids=batch["document_ids"])
    assert torch.allclose(ours.flatten(), loss, atol=1e-5)
    (grad,) = torch.autograd.grad((loss * batch["loss_mask"].flatten()).sum(), logits)
    moved = grad.transpose(0, 1).abs().amax(-1) > 0
    assert torch.equal(moved, batch["loss_mask"] > 0)
    lines = [json.loads(line) for line in Path(files["sft"].split()[1]).read_text().splitlines()]
    wanted = sum(len(line["completion"]) + 1 for line in lines)  # each of its bytes, the first among them, and the stop
    assert int(trainer.train_set.items.counts.sum()) == wanted  # type: ignore[attr-defined]


def test_stale_pages_of_the_engine_show_in_the_gap(files: dict[str, str]) -> None:
    """The bug that broke prefix caching in public frameworks: weights are handed over, keys and values stay."""
    words = ANSWERS.replace("--environment format", "--environment tests.posttraining.environments:Long")
    line = f"{words} --micro-batch-size 8 --lr 3e-2 --seq-length 64"
    gaps = []
    for forgets in (True, False):
        trainer = trainer_of("grpo", line)
        sampler = trainer.task.observer.sampler  # type: ignore[attr-defined]
        if not forgets:
            sampler.engine.scheduler.new_weights = lambda version: None
        trainer.train()
        trainer.close()
        gaps.append(max(report.losses["layout gap"] for report in trainer.history))
    assert gaps[0] < 1e-5 and gaps[1] > 1e-3


def test_the_gap_to_an_engine_in_bf16_is_told_apart_from_staleness_and_from_its_kernels(files: dict[str, str]) -> None:
    trainer = trainer_of("grpo", f"{ANSWERS} --micro-batch-size 8 --train-iters 4 --rl-inference-dtype bf16")
    trainer.train()
    trainer.close()
    first, second = ([report.losses for report in trainer.history[i::2]] for i in (0, 1))  # updates of each rollout
    assert all(of["staleness"] == 0 for of in first) and all(of["staleness"] > 1e-6 for of in second)
    for of in (*first, *second):
        assert of["dtype gap"] > 1e-4 and of["layout gap"] < of["dtype gap"] / 4


@pytest.mark.parametrize("task", ["sft", "dpo", "reward"])
def test_a_small_step_lowers_the_loss_of_its_own_batch_by_the_square_of_the_gradient_norm(
    task: str, files: dict[str, str], tmp_path: Path
) -> None:
    """loss(w - lr g) = loss(w) - lr |g|^2 + O(lr^2): loss, gradient and update belong to each other."""
    lines = Path(files[task].split()[1]).read_text().splitlines(keepends=True)[:8]  # an epoch is a batch
    (tmp_path / "some.jsonl").write_text("".join(lines))
    line = (
        f"--data-path {tmp_path}/some.jsonl --split 100 --global-batch-size 8 --micro-batch-size 4 --train-iters 2 "
        "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0 --lr 1e-3"
    )
    first, second = curve(0, 1, task, line)
    name = next(name for name in first if name.endswith("loss"))
    assert first[name] - second[name] == pytest.approx(1e-3 * first["norm"] ** 2, rel=0.05)
    if task == "dpo":
        assert first[name] == pytest.approx(math.log(2), rel=1e-5)
        assert second["chosen reward"] - second["rejected reward"] > 0 == first["chosen reward"]
