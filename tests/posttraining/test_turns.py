"""An environment of several turns: what it says between them is read by the model and learned by nobody."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.posttraining.environments import ENVIRONMENTS, Problem
from minimegatron.posttraining.rollouts import Episode
from minimegatron.training.trainer import Trainer
from tests.posttraining.test_tasks import TP, check_resumed, curve, near, trainer_of
from tests.thorough import SLOW

GUESS = (
    "--environment guess --grpo-prompts-per-step 4 --grpo-group-size 4 --max-completion-length 3 "
    "--global-batch-size 8 --train-iters 3 --seq-length 48 --grpo-kl-beta 0.1"
)


@pytest.fixture(scope="session")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that answers `digit?`, and what is said to a guess, with a digit and the end of its turn."""
    folder = tmp_path_factory.mktemp("guesser")
    asked = ["digit?", *(f"digit?{k} {said} " for k in range(10) for said in ("higher", "lower"))]
    lines = [{"prompt": text, "completion": str(k)} for text in asked for k in range(10)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = "--split 100 --global-batch-size 32 --micro-batch-size 32 --train-iters 30 --lr 5e-3"
    trainer = trainer_of("sft", f"--data-path {folder}/lines.jsonl {words} --save {folder}/run")
    trainer.train()
    trainer.close()
    return f"--load {folder}/run --finetune"


def after_a_rollout(task: str, line: str) -> tuple[Trainer, list[Episode]]:
    """A trainer that has drawn its first rollout, and the episodes of it."""
    trainer = trainer_of(task, line)
    episodes: list[Episode] = []
    rollouts = trainer.task.rollouts  # type: ignore[attr-defined]
    fill = rollouts.fill

    def keep(number: int, played: Sequence[Episode]) -> None:
        episodes.extend(played)
        fill(number, played)

    rollouts.fill = keep
    for observer in trainer.observers:
        observer.begin(0)
    trainer.observers[0].before_step(0)
    return trainer, episodes


def test_what_guess_says() -> None:
    environment = ENVIRONMENTS["guess"]()
    problem = Problem("digit?", "4")
    said = [environment.turn(problem, answers) for answers in (["2"], ["2", "7"], ["2", "7", " 4 "])]
    assert [(turn.reward, turn.said) for turn in said] == [(0.0, " higher "), (0.0, " lower "), (1.0, "")]
    for answers in (["12"], ["x"], [""], ["1", "2", "3", "5"]):
        assert (environment.turn(problem, answers).reward, environment.turn(problem, answers).said) == (0.0, "")


def test_an_episode_is_what_was_said_in_turns(guesser: str) -> None:
    """Ids, marks and rewards of each episode follow from its answers, by the rules of the environment."""
    trainer, episodes = after_a_rollout("grpo", f"{GUESS} {guesser} --micro-batch-size 8")
    tokenizer, rollouts = trainer.data.tokenizer, trainer.task.rollouts  # type: ignore[attr-defined]
    assert sum(len(episode.answers) > 1 for episode in episodes) > 4, "most have several turns"
    for i, episode in enumerate(episodes):
        ids, drawn, answers = list(tokenizer.tokenize("digit?")), [False] * 6, episode.answers
        for answer in answers[:-1]:
            assert len(answer) == 1 and answer != episode.problem.answer
            said = tokenizer.tokenize(" higher " if answer < episode.problem.answer else " lower ")
            ids += [*tokenizer.tokenize(answer), tokenizer.eod, *said]
            drawn += [True, True, *[False] * len(said)]
        last = episode.ids[len(ids) :]
        assert tokenizer.detokenize(last if episode.cut else last[:-1]) == answers[-1]
        assert (ids, drawn) == (episode.ids[: len(ids)], episode.drawn[: len(ids)]) and all(episode.drawn[len(ids) :])
        assert episode.reward == float(answers[-1].strip() == episode.problem.answer)
        marks = torch.zeros(rollouts.tokens.shape[1], dtype=torch.bool)
        marks[: len(episode.ids)] = torch.tensor(episode.drawn)
        for name in ("engine_log_probs", "old_log_probs", "reference_log_probs", "advantages"):
            assert not rollouts.numbers[name][i, ~marks].any()
        assert (rollouts.numbers["engine_log_probs"][i, marks] < 0).all()
        gap = rollouts.numbers["engine_log_probs"][i] - rollouts.numbers["old_log_probs"][i]
        assert gap.abs().max() < 1e-4, "the trainer reads the whole conversation, as the engine did"
    trainer.close()


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_what_the_environment_said_has_no_gradient(guesser: str, task: str) -> None:
    """The gradient of every logit, and of every value, is 0 but where the model's own tokens were drawn."""
    trainer, episodes = after_a_rollout(task, f"{GUESS} {guesser} --micro-batch-size 8")
    batch = trainer.task.rollouts.batch_of_rows(range(16))  # type: ignore[attr-defined]
    with torch.no_grad():
        outputs = "both" if task == "ppo" else "logits"
        found = trainer.model(batch["tokens"], batch["position_ids"], outputs=outputs)
    parts = [part.detach().requires_grad_() for part in (found if task == "ppo" else [found])]
    loss, _, _ = trainer.task.loss(batch, trainer.mesh, tuple(parts) if task == "ppo" else parts[0])  # type: ignore[attr-defined]
    gradients = torch.autograd.grad(loss, parts)
    moved = gradients[0].transpose(0, 1).abs().amax(-1) > 0
    counts, width = batch["loss_mask"] > 0, batch["tokens"].shape[1]
    assert not moved[~counts].any() and moved[counts & (batch["advantages"] != 0)].all()
    for values in gradients[1:]:
        assert not values[~counts].any() and values[counts].any()
    for i, episode in enumerate(episodes):
        assert counts[i].tolist() == [*episode.drawn[1:], *[False] * (width + 1 - len(episode.drawn))]
        after_said = [n for n in range(7, len(episode.drawn)) if episode.drawn[n] and not episode.drawn[n - 1]]
        assert len(after_said) == len(episode.answers) - 1 and all(counts[i, n - 1] for n in after_said)
    trainer.close()


@SLOW
@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_a_run_of_several_turns_goes_on_to_the_bit(guesser: str, tmp_path: Path, task: str) -> None:
    """It stops in the middle of a rollout."""
    check_resumed(task, f"{GUESS} --micro-batch-size 4 --lr-decay-iters 3", tmp_path, guesser)


@SLOW
def test_several_turns_over_tp(ranks: Any, guesser: str) -> None:
    serial = curve(0, 1, "grpo", f"{GUESS} {guesser} --micro-batch-size 8")
    for found in ranks(2).run(curve, "grpo", f"{GUESS} {guesser} --micro-batch-size 4 {TP}"):
        near(found, serial)
