"""Rollouts: answers that the model draws for its own training, and their rewards, as a training set.

The problem in a sentence: the samples of a step do not exist until the weights of that step do.

    before a step   are the samples of the last rollout used up?
                      weights -> engine (`inference/refit`), in another layout of the same ranks; its version goes up
                      engine: G answers to each of P problems, by version and seed alone
                      environment: rewards          task: advantages, from rewards
                      trainer: log-probabilities of what was drawn, by policy and reference
    the step        reads its samples by number, as from any training set

The trainer is the one of pre-training: an observer fills the buffer before a step, and the data set reads from it. So
rollouts resume as data does: sample k belongs to rollout k // (P G iterations), and what that rollout was is in the
checkpoint (`Rollouts.tensors`), because the weights that drew it are gone.

**Versions.** Keys and values in the engine's pages belong to the weights that computed them. A refit raises the
engine's version, and no older page is reused; the number of the rollout is stored with the answers.

**The gap.** The engine computes log-probabilities by other kernels, in another layout and perhaps in another dtype, and
an answer may be older than the weights that learn from it. For each drawn token

    log pi_now - log pi_engine  =    (log pi_now - log pi_old)            staleness
                                   + (log pi_old - log pi_rounded)        dtype
                                   + (log pi_rounded - log pi_engine)     layout

pi_old is the trainer's model with the weights that drew; pi_rounded is the same in the engine's dtype, computed only if
that is another one. Mean absolute values are reported in every step: a stale cache or a wrong temperature shows in
`layout gap` at once, and long before the reward falls.

Megatron-LM: `get_rollout_data`, `prepare_data_for_update` in `megatron/rl/rl_utils.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from minimegatron.checkpoint.packed import read_base
from minimegatron.checkpoint.regions import Logical
from minimegatron.comm.agree import gather_objects, on_all_ranks
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.data.tokenizer import Tokenizer
from minimegatron.errors import DataError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete
from minimegatron.inference.refit import Refit
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.sequence import FinishReason, Request
from minimegatron.layers.logical import materialize
from minimegatron.models.chunks import build_chunks
from minimegatron.models.spec import spec_from_name
from minimegatron.posttraining.environments import Environment, Problem, Turn, judge
from minimegatron.training.run_state import RunState, model_weights


@dataclasses.dataclass
class Episode:
    """The turns of one answer to a problem.

    Attributes:
        problem: what was asked.
        ids: the prompt, the model's tokens, and what the environment said.
        drawn: for each id whether the model drew it.
        log_probs: for each id the engine's log-probability; 0 where it was not drawn.
        answers: the model's texts, a turn each.
        reward: of all turns.
        over: the environment has ended it.
        cut: the last answer has no stop id: it was cut at the longest length.
        reason: why the last answer's reward is not whole; "" where the environment does not say.
    """

    problem: Problem
    ids: list[int]
    drawn: list[bool]
    log_probs: list[float]
    answers: list[str] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    over: bool = False
    cut: bool = False
    reason: str = ""


class Sampler:
    """Plays episodes with the policy's weights, in a layout of its own; all ranks call it together.

    Args:
        run: the run; `task` has the layout and the lengths (`RolloutConfig`).
        state: whose weights it takes.
        tokenizer: of the answers.
        prompt: a problem to the ids that the model continues.
        environment: judges the answers.
        sampling: how a token is drawn.

    Attributes:
        engine: this rank's engine.
    """

    def __init__(
        self,
        run: RunConfig,
        state: RunState,
        tokenizer: Tokenizer,
        prompt: Callable[[Problem], Sequence[int]],
        environment: Environment,
        sampling: SamplingParams,
    ) -> None:
        self.task, self.state, self.tokenizer = run.task, state, tokenizer
        self.prompt, self.environment, self.sampling = prompt, environment, sampling
        mesh = Mesh.build(inference_layout(run, state.mesh.world.size))
        self.dtype = self.task.rl_inference_dtype or run.model.params_dtype
        config = run.model.replace(params_dtype=self.dtype, hidden_dropout=0.0, attention_dropout=0.0, value_head=False)
        with torch.device("meta"):
            model = build_chunks(config, mesh, spec_from_name(run.spec, config))
        materialize(model, mesh.device)
        on_all_ranks(lambda: read_base(model, config), mesh.world)
        longest = run.data.seq_length + 1
        sizes = EngineConfig(max_model_len=longest, max_num_seqs=self.task.rl_max_num_seqs,
                             max_num_batched_tokens=max(512, self.task.rl_max_num_seqs))  # fmt: skip
        self.engine = Engine(model.eval(), sizes)
        self.refit = Refit(self._weights(), self.engine, cast=self.dtype != run.model.params_dtype)
        self.longest = longest
        stops = {tokenizer.eod, *getattr(tokenizer, "special_ids", ())}
        self.stop_ids = frozenset(stops)

    def take_weights(self) -> None:
        """Copy the trainer's weights into the engine, whose version goes up: no page of older weights is reused."""
        self.refit(self._weights())

    def _weights(self) -> dict[str, Logical]:
        """The trainer's weights that the engine has as well."""
        weights = model_weights(self.state.model)
        return {name: weight for name, weight in weights.items() if not name.startswith("value_head.")}

    def play(self, problems: Sequence[Problem], answers: int, seed: int, greedy: bool = False) -> list[Episode]:
        """`answers` episodes of each problem, in the order of the problems, on every rank.

        Args:
            problems: the same on all ranks.
            answers: episodes of each.
            seed: of the draws; which rank draws an episode does not matter.
            greedy: take the likeliest token.
        """
        mesh = self.engine.model.mesh
        mine = range(mesh.dp.rank, len(problems), mesh.dp.size)
        played = self._play([problems[i] for i in mine], list(mine), answers, seed, greedy)
        leads = mesh.tp.rank == mesh.pp.rank == 0
        everyone = gather_objects(played if leads else None, mesh.world)
        of_problem = {i: group for each in everyone if each is not None for i, group in each.items()}
        return [episode for i in range(len(problems)) for episode in of_problem[i]]

    def _play(
        self, problems: Sequence[Problem], numbers: list[int], answers: int, seed: int, greedy: bool
    ) -> dict[int, list[Episode]]:
        groups = {}
        for number, problem in zip(numbers, problems, strict=True):
            prompt = self.prompt(problem)
            n = len(prompt)
            groups[number] = [Episode(problem, list(prompt), [False] * n, [0.0] * n) for _ in range(answers)]
        turn = 0
        while playing := [(n, j, e) for n, group in groups.items() for j, e in enumerate(group) if not e.over]:
            self._one_turn(playing, seed, turn, greedy)
            turn += 1
        return groups

    def _one_turn(self, playing: list[tuple[int, int, Episode]], seed: int, turn: int, greedy: bool) -> None:
        requests = []
        for number, answer, episode in playing:
            room = self.longest - len(episode.ids)
            if room < 1:
                raise DataError(
                    f"an episode has {len(episode.ids)} tokens before its answer, and {self.longest} fit",
                    where=f"problem {number}",
                    fix="a larger --seq-length",
                )
            requests.append(
                Request(
                    tuple(episode.ids),
                    min(self.task.max_completion_length, room),
                    GREEDY if greedy else self.sampling,
                    self.stop_ids,
                    seed=draw_seed(seed, number, answer, turn),
                    log_probs=0,
                )
            )
        drawn = [made for (made,) in complete(self.engine, requests)]
        for (_, _, episode), made in zip(playing, drawn, strict=True):
            text = made.answer[:-1] if made.reason is FinishReason.STOP else made.answer
            episode.answers.append(self.tokenizer.detokenize(text))
        for (_, _, episode), made, told in zip(playing, drawn, self._judged(playing), strict=True):
            stopped = made.reason is FinishReason.STOP
            episode.ids += made.answer
            episode.drawn += [True] * len(made.answer)
            episode.log_probs += made.log_probs
            episode.reward += told.reward
            episode.reason = told.reason
            said = self.tokenizer.tokenize(told.said) if told.said and stopped else []
            episode.cut = not stopped
            episode.over = not said or len(episode.ids) + len(said) >= self.longest
            if not episode.over:
                episode.ids += said
                episode.drawn += [False] * len(said)
                episode.log_probs += [0.0] * len(said)

    def _judged(self, playing: Sequence[tuple[int, int, Episode]]) -> list[Turn]:
        """What the environment says, on every rank what it has said on one: a program need not end twice alike."""
        runner = self.engine.runner
        turns: list[Turn] | Exception = []
        if runner.leads:
            try:
                turns = judge(self.environment, [(episode.problem, episode.answers) for _, _, episode in playing])
            except Exception as error:  # the other ranks wait for what is said
                turns = error
        turns = runner.tell(turns)
        if isinstance(turns, Exception):
            raise turns
        return turns


def draw_seed(seed: int, number: int, answer: int, turn: int) -> int:
    """The seed of one request: a function of all that tells it from others, and not of the rank that draws."""
    return int(np.random.SeedSequence([seed, number, answer, turn]).generate_state(1, np.uint64)[0] >> 1)


def inference_layout(run: RunConfig, world: int) -> ParallelConfig:
    """The engine's layout on the run's ranks: that of `--rl-inference-...`, with replicas on the ranks that are left.

    Raises:
        ConfigError: the layout does not fit the ranks.
    """
    task = run.task
    layout = ParallelConfig(
        tensor_model_parallel_size=task.rl_inference_tensor_model_parallel_size,
        pipeline_model_parallel_size=task.rl_inference_pipeline_model_parallel_size,
        expert_model_parallel_size=task.rl_inference_expert_model_parallel_size,
        distributed_timeout_seconds=run.parallel.distributed_timeout_seconds,
    )
    layout.data_parallel_size(world)
    return layout


class Rollouts(Dataset):
    """The answers of one rollout, as the samples of the steps that learn from it.

    Args:
        run: the run.
        num_samples: samples of all steps.
        batch_size: samples of a step.
        numbers: names of the numbers of each token, beside the ids and `drawn`.

    Attributes:
        tokens: [N, s + 1] int64, prompt, answer, zeros.
        lengths: [N], ids of each.
        numbers: name -> [N, s + 1] float32, a number for each id.
        rewards: [N].
        number: [1] int64, which rollout this is; -1 before the first.
    """

    known = False

    def __init__(self, run: RunConfig, num_samples: int, batch_size: int, numbers: Sequence[str]) -> None:
        task, s = run.task, run.data.seq_length
        self.size = task.grpo_prompts_per_step * task.grpo_group_size
        self.iterations, self.seed, self.num_samples = task.grpo_iterations, run.training.seed, num_samples
        self.sequence_length, self.batch_size = s, batch_size
        parallel = run.parallel
        self.multiple = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
        self.tokens = torch.zeros(self.size, s + 1, dtype=torch.int64)
        self.lengths = torch.zeros(self.size, dtype=torch.int64)
        self.numbers = {name: torch.zeros(self.size, s + 1) for name in ("drawn", *numbers)}
        self.rewards = torch.zeros(self.size)
        self.number = torch.full((1,), -1, dtype=torch.int64)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it, for a checkpoint."""
        named = {"tokens": self.tokens, "lengths": self.lengths, "rewards": self.rewards, "number": self.number}
        return {f"rollout.{name}": tensor for name, tensor in {**named, **self.numbers}.items()}

    @property
    def steps(self) -> int:
        """Steps that learn from a rollout."""
        return self.size * self.iterations // self.batch_size

    def keep(self, name: str, scores: torch.Tensor) -> None:
        """Keep a number for the label of every token of all answers, [N, width]."""
        labels = slice(1, scores.shape[1] + 1)
        self.numbers[name][:, labels] = scores * self.numbers["drawn"][:, labels]

    def rollout_of(self, sample: int) -> int:
        """The rollout that a sample belongs to."""
        return sample // (self.size * self.iterations)

    def fill(self, number: int, episodes: Sequence[Episode]) -> None:
        """Take the episodes of a rollout; numbers beside `drawn` and `engine_log_probs` follow from these."""
        self.number.fill_(number)
        for tensor in (self.tokens, *self.numbers.values()):
            tensor.zero_()
        for i, episode in enumerate(episodes):
            n = len(episode.ids)
            self.tokens[i, :n] = torch.tensor(episode.ids)
            self.numbers["drawn"][i, :n] = torch.tensor(episode.drawn, dtype=torch.float32)
            self.numbers["engine_log_probs"][i, :n] = torch.tensor(episode.log_probs)
            self.lengths[i], self.rewards[i] = n, episode.reward

    @property
    def width(self) -> int:
        """Inputs of a row: those of the longest answer, rounded up to what the layout divides."""
        longest = int(self.lengths.max()) - 1
        return min(-(-longest // self.multiple) * self.multiple, self.sequence_length)

    def __len__(self) -> int:
        return self.num_samples

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{"rollouts": how many the first `samples` samples are}."""
        return {"rollouts": samples / (self.size * self.iterations)}

    def begun(self, first: int, end: int) -> dict[str, int]:
        """{}: a rollout has lines of its own in the log."""
        return {}

    def batch(self, samples: Sequence[int]) -> Batch:
        """tokens, labels, position_ids: [b, w] int64; loss_mask, numbers of the labels, rewards, lengths: [b, w].

        Raises:
            DataError: a sample of another rollout than the one that is here.
        """
        here, rows = int(self.number), []
        for k in samples:
            if self.rollout_of(k) != here:
                raise DataError(f"sample {k} is of rollout {self.rollout_of(k)}, and rollout {here} is here")
            iteration, place = divmod(k % (self.size * self.iterations), self.size)
            order = np.random.default_rng([self.seed, here, iteration]).permutation(self.size)
            rows.append(int(order[place]))
        return self.batch_of_rows(rows)

    def batch_of_rows(self, rows: Sequence[int]) -> Batch:
        """The batch of answers by their numbers in the rollout."""
        w, index = self.width, torch.tensor(list(rows))
        text = self.tokens[index, : w + 1]
        batch = {"tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone()}
        batch["position_ids"] = torch.arange(w).expand(len(rows), w).contiguous()
        batch |= {name: values[index, 1 : w + 1] for name, values in self.numbers.items()}
        batch["loss_mask"] = batch.pop("drawn")
        batch["rewards"] = self.rewards[index, None].expand(len(rows), w).contiguous()
        batch["answer_lengths"] = self.numbers["drawn"][index].sum(1, keepdim=True).expand(len(rows), w).contiguous()
        return batch
