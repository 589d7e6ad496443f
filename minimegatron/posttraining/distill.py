"""Distillation: the loss of a token is a divergence between the teacher's distribution p and the student's q.

| `--beta` | divergence D                        | w_j = q_j dD / dq_j           | the student                         |
|----------|-------------------------------------|-------------------------------|-------------------------------------|
| 0        | sum_j p_j (log p_j - log q_j)       | -p_j                          | covers all that the teacher may say |
| 1        | sum_j q_j (log q_j - log p_j)       | q_j (log q_j - log p_j)       | seeks what the teacher says most    |
| between  | beta KL(p, m) + (1 - beta) KL(q, m) | (1 - beta) q_j log(q_j / m_j) | something between; D is bounded     |

with m = beta p + (1 - beta) q. Whatever the divergence, its gradient with respect to the student's logits z is
w_j - q_j sum_i w_i (a constant in dD / dq_j drops out), so one function serves all. At a temperature T logits are
z / T, and the gradient is divided by T. The cross entropy of the labels may be mixed in by a weight a.

**Whose answers.** `--lmbda` is the share of rows whose answers the student draws itself (`on_policy`). A student that
learns from given answers alone never sees the prefixes that its own mistakes lead to; on its own answers the teacher
says at each token what should have come instead.

**Memory.** [tokens, V] in fp32 is often the largest tensor of a step, and a plain formula makes five of them: logits of
both models, both softmaxes, a gradient. Here there is one: the student's logits. The teacher's are computed a chunk of
tokens at a time from its last hidden states, and the gradient of a chunk overwrites the student's logits, which nobody
needs any more: the output layer's own backward pass needs its input, not its output.

**Over a cut vocabulary** each rank has V/t columns of both. Five messages of [tokens]-sized tensors: the largest
logits and the sums of exponentials of both models, then the sums that are the divergence. With labels at another
temperature there are two more.

**In a pipeline** the teacher's last hidden states of all microbatches of a step are computed before the student's
schedule runs (`Task.prepare`), by the same pipeline ranks.

Hinton et al. 2015 (arXiv 1503.02531); Agarwal et al. 2024 (GKD, arXiv 2306.13649); Gu et al. 2024 (MiniLLM,
arXiv 2306.08543): reverse. TRL: `trl/trainer/distillation_trainer.py`, `trl/experimental/gkd`, whose names
`lmbda` and `beta` are. Megatron-LM: `megatron/post_training/loss_func.py`, with ModelOpt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minimegatron.checkpoint.conversion import fill, open_model
from minimegatron.comm import collectives as c
from minimegatron.comm.agree import on_all_ranks
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch
from minimegatron.errors import ConfigError
from minimegatron.inference.sampling import SamplingParams
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.posttraining.on_policy import DRAWN, ENGINE, DrawsAnswers, OwnAnswers, Unjudged, prompt_ids
from minimegatron.posttraining.rollouts import Sampler
from minimegatron.posttraining.rows import RowDataset
from minimegatron.posttraining.sft import SFT
from minimegatron.training.build import build_replica
from minimegatron.training.datasets import Joint, RunData
from minimegatron.training.observers import Observer
from minimegatron.training.observers.evaluation import eval_mode, forward_passes
from minimegatron.training.run_state import RunState, model_weights
from minimegatron.training.step import Loss, LossFunc

HIDDEN = "teacher_hidden"
Rows = Callable[[int, int], torch.Tensor]  # tokens [first, stop) -> the teacher's logits of them, [n, V'/t]


def divergence(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: Rows,
    tp: Axis,
    *,
    vocab_size: int,
    beta: float = 0.0,
    temperature: float = 1.0,
    label_weight: float = 0.0,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of every token, and what it is made of; the gradient overwrites the logits.

    Args:
        logits: [n, V'/t] of the student; used by nothing else afterwards.
        labels: [n].
        teacher: the teacher's logits of a range of tokens.
        tp: shares the vocabulary.
        vocab_size: V; the rest is padding.
        beta: see the table of this module.
        temperature: T of the divergence; the labels' cross entropy is at 1.
        label_weight: a; the loss is (1 - a) divergence + a cross entropy.
        chunk: tokens at a time.

    Returns:
        loss, divergence, cross entropy, and the labels' log-probabilities at T, [n] each, in fp64 if the logits are,
        else in fp32; only the first has a gradient.
    """
    options = (vocab_size, beta, temperature, label_weight, chunk)
    return _Divergence.apply(logits, labels, teacher, tp, *options)  # type: ignore[no-any-return]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        teacher: Rows,
        tp: Axis,
        vocab_size: int,
        beta: float,
        temperature: float,
        a: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        n, width = logits.shape
        first = tp.rank * width
        real = max(0, min(width, vocab_size - first))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        found = torch.empty(4, n, dtype=dtype, device=logits.device)
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            z = logits[start:stop, :real].to(dtype)
            log_q, log_p = (_log_softmax(x / temperature, tp) for x in (z, teacher(start, stop)[:, :real].to(dtype)))
            log_one = log_q if temperature == 1.0 else _log_softmax(z, tp)
            here = labels[start:stop] - first
            mine = (here >= 0) & (here < real)
            place = here.clamp(0, max(real - 1, 0))[:, None]
            picked = [_picked(x, place, mine) for x in (log_one, log_q)]
            terms, w = _terms(log_p, log_q, beta)
            summed = c.all_reduce(torch.stack([terms.sum(1), -picked[0], picked[1], w.sum(1)]), tp)
            found[:, start:stop] = summed
            if not ctx.needs_input_grad[0]:
                continue
            gradient = w.addcmul_(log_q.exp(), summed[3, :, None], value=-1).mul_((1 - a) / temperature)
            if a:
                one = log_one.exp()
                one.scatter_add_(1, place, -mine[:, None].to(one.dtype))
                gradient += a * one
            logits[start:stop, :real] = gradient.to(logits.dtype)
            logits[start:stop, real:] = 0
        ctx.gradient = logits
        parts = (found[0], found[1], found[2])
        ctx.mark_non_differentiable(*parts)
        return (1 - a) * found[0] + a * found[1], *parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradient = ctx.gradient
        gradient *= grads[0][:, None].to(gradient.dtype)
        return gradient, *[None] * 8


def _terms(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of the sum that is the divergence, and w; see the table of this module."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        return p * (log_p - log_q), -p
    if beta == 1.0:
        terms = q * (log_q - log_p)
        return terms, terms
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    w = (1 - beta) * q * (log_q - log_m)
    return beta * p * (log_p - log_m) + w, w


def _picked(log_probs: torch.Tensor, place: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The label's column of each row, [n, w] -> [n]; 0 where another rank has it."""
    if not log_probs.shape[1]:
        return log_probs.new_zeros(len(log_probs))
    return log_probs.gather(1, place)[:, 0].masked_fill(~mine, 0.0)


def _log_softmax(z: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Of columns that are shared over tp: [n, w] -> [n, w]."""
    top = z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
    z = z - c.all_reduce(top, tp, "max")[:, None]
    return z - c.all_reduce(z.exp().sum(1), tp).log()[:, None]


class Distill(SFT):
    """Conversations, of which the assistant's tokens count, and a teacher."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        self.config = run.task
        self.teacher: DataParallel | None = None

    def load_data(
        self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
    ) -> RunData:
        """The rows of SFT; with `--lmbda` the student answers some of those it is trained on itself."""
        self.given = super().load_data(run, mesh, num_samples, joint, quiet)
        if not self.config.lmbda or self.given.train is None:
            return self.given
        assert isinstance(self.given.train, RowDataset)
        return dataclasses.replace(self.given, train=OwnAnswers(self.given.train, self.config.lmbda))

    def begin(self, state: RunState, data: RunData, say: Callable[[str], None]) -> Sequence[Observer]:
        super().begin(state, self.given, say)
        self.state = state
        self.teacher = load_teacher(self.config.teacher, state, say)
        self.stage = _last_stage(self.teacher)
        if not isinstance(data.train, OwnAnswers):
            return ()
        sampling = SamplingParams(self.config.distill_temperature)
        sampler = Sampler(state.run, state, data.tokenizer, prompt_ids, Unjudged(), sampling)
        return [DrawsAnswers(data.train, state, sampler)]

    def prepare(self, batches: Iterator[Batch], num_microbatches: int) -> Iterator[Batch]:
        """The batches, with the teacher's last hidden states on the last stage."""
        assert self.teacher is not None
        kept: list[Batch] = []
        hidden: list[torch.Tensor] = []

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[[Any], Loss]]:
            batch = next(data_iterator)
            more = {"document_ids": batch["document_ids"], "outputs": "hidden"}
            output = model(batch["tokens"], batch["position_ids"], **more)

            def keep(output: torch.Tensor) -> Loss:
                hidden.append(output.detach())
                zero = torch.zeros((), device=output.device)
                return zero, zero, {}

            return output, keep

        def reading() -> Iterator[Batch]:
            for _ in range(num_microbatches):
                kept.append(next(batches))
                yield kept[-1]

        with torch.no_grad(), eval_mode(self.teacher):
            forward_passes(forward_step, reading(), self.teacher, num_microbatches)
        if hidden:
            kept = [batch | {HIDDEN: of_teacher} for batch, of_teacher in zip(kept, hidden, strict=True)]
        return iter(kept)  # not a generator: the teacher's pipeline must have run before the student's begins

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], document_ids=batch["document_ids"])
        return output, partial(self.loss, batch)

    def loss(self, batch: Batch, logits: torch.Tensor) -> Loss:
        """The sum of the losses of the tokens that count, their number, and both parts of the loss.

        Args:
            batch: with the teacher's last hidden states, [s', b, h].
            logits: [s / cp, b, V'/t] of the student; overwritten.
        """
        task, mesh, hidden = self.config, self.state.mesh, batch[HIDDEN]
        if mesh.sequence_parallel:
            hidden = c.gather_from_sequence_region(hidden, mesh.tp)
        flat = hidden.flatten(0, 1)
        if self.state.run.model.final_logit_softcapping is not None:
            logits = logits.clone()  # the backward pass of tanh needs them
        *losses, log_probs = divergence(
            logits.flatten(0, 1),
            batch["labels"].t().flatten(),
            lambda first, stop: self.stage.logits_of_rows(flat[first:stop]),  # type: ignore[no-any-return]
            mesh.tp,
            vocab_size=self.state.run.model.vocab_size,
            beta=task.beta,
            temperature=task.distill_temperature,
            label_weight=task.distill_label_weight,
            chunk=task.distill_chunk,
        )
        mask = batch["loss_mask"].t().flatten()
        sums = [x.masked_fill(mask == 0, 0.0).sum() for x in losses]
        tokens = mask.sum(dtype=torch.float64)
        names = ("distillation loss", "divergence", "cross entropy")
        report = {name: torch.stack([x.detach().double(), tokens]) for name, x in zip(names, sums, strict=True)}
        if DRAWN in batch:
            drawn, engine = (batch[name].t().flatten() for name in (DRAWN, ENGINE))
            gap = (log_probs - engine).abs().masked_fill(drawn == 0, 0.0)
            report["engine gap"] = torch.stack([gap.sum(dtype=torch.float64), drawn.sum(dtype=torch.float64)])
        return sums[0], tokens, report


def load_teacher(folder: str, state: RunState, say: Callable[[str], None]) -> DataParallel:
    """The teacher in the run's layout, frozen; all ranks call it.

    Raises:
        ConfigError, CheckpointError: on every rank: no model, one that does not fit the layout, or another vocabulary.
    """
    run, world = state.run, state.mesh.world
    published = on_all_ranks(lambda: open_model(Path(folder)), world)
    config = published.config.replace(params_dtype=run.model.params_dtype, kernels=run.model.kernels)
    if config.vocab_size != run.model.vocab_size:
        raise ConfigError(
            f"the teacher has {config.vocab_size} words, the student {run.model.vocab_size}",
            where=folder,
            fix="a student with the teacher's tokenizer; --vocab-size makes the vocabulary as large",
        )
    teacher = on_all_ranks(lambda: build_replica(dataclasses.replace(run, model=config, spec=None), state.mesh), world)
    on_all_ranks(lambda: fill(model_weights(teacher), published, config.params_dtype), world)
    say(f"teacher: {config.num_layers} layers, h {config.hidden_size}, from {folder}")
    return teacher


def _last_stage(model: DataParallel) -> Any:
    """The stage of this rank that has the output layer; None where it has none."""
    stages = getattr(model.module, "chunks", [model.module])
    return next((stage for stage in stages if stage.post_process), None)
