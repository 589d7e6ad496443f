"""Direct preference optimisation: pairs of answers, and a reference that is this model before its first step.

The reference's log-probabilities are numbers, not a model: before the first step the model itself scores all rows, and
the numbers stay beside the tokens, in memory and in checkpoints. That costs one forward pass over the data and four
bytes a token, where a frozen copy would cost the memory of the model and a forward pass in every step.

The loss counts pairs. With a row of n sequences, 2i is chosen and 2i + 1 rejected (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.checkpoint.regions import Logical
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch
from minimegatron.posttraining.conversations import Encoder, Tokens
from minimegatron.posttraining.preferences import preference_loss
from minimegatron.posttraining.rows import RowDataset
from minimegatron.posttraining.scoring import log_probs
from minimegatron.posttraining.sequences import counted_once, sequence_sums
from minimegatron.posttraining.sft import SFT
from minimegatron.training.datasets import RunData
from minimegatron.training.observers import Observer
from minimegatron.training.run_state import RunState
from minimegatron.training.step import Loss, LossFunc

REFERENCE = "reference_log_probs"


class DPO(SFT):
    """Pairs of a chosen and a rejected answer to a prompt."""

    prefers = True

    def form(self, encoder: Encoder, line: Mapping[str, Any]) -> list[Tokens]:
        return encoder.pair(line)

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        self.config, self.sets = run.task, dict[str, RowDataset]()
        self.counts_per_token = 1 / run.data.seq_length

    def begin(self, state: RunState, data: RunData, say: Callable[[str], None]) -> Sequence[Observer]:
        super().begin(state, data, say)
        named = {"train": data.train, "validation": data.valid, "test": data.test}
        self.sets = {name: rows for name, rows in named.items() if isinstance(rows, RowDataset)}
        for rows in self.sets.values():
            rows.extra[REFERENCE] = torch.zeros(len(rows.items.ids)).numpy()
        return [Reference(state, self.sets)]

    def tensors(self) -> dict[str, torch.Tensor | Logical]:
        return {f"{REFERENCE}.{name}": torch.from_numpy(rows.extra[REFERENCE]) for name, rows in self.sets.items()}

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], batch["labels"], document_ids=batch["document_ids"])
        most = max(rows.most_sequences for rows in self.sets.values())
        return output, partial(pairs_loss, batch, model.mesh, most, self.config)


def pairs_loss(batch: Batch, mesh: Mesh, n: int, config: Any, losses: torch.Tensor) -> Loss:
    """The sum of the losses of a microbatch's pairs, and how many there are.

    Args:
        batch: rows of pairs.
        mesh: its cp axis shares the tokens.
        n: most sequences of a row.
        config: `DPOConfig`.
        losses: [b, s / cp], minus the log-probability of each label.
    """
    mask = batch["loss_mask"]
    moved = (-losses - batch[REFERENCE]).masked_fill(mask == 0, 0.0)
    ratios, lengths = (
        sequence_sums(values, batch["document_ids"], n, mesh).unflatten(1, (n // 2, 2)) for values in (moved, mask)
    )
    is_pair = lengths.min(-1).values > 0
    of_pair = preference_loss(
        ratios, lengths.clamp(min=1), config.dpo_loss_type, config.beta, config.label_smoothing
    ).masked_fill(~is_pair, 0.0)
    pairs = counted_once(is_pair.sum().double(), mesh)
    rewards = (config.beta * ratios.detach()).masked_fill(~is_pair[..., None], 0.0)
    margins = rewards[..., 0] - rewards[..., 1]
    figures = {
        "dpo loss": of_pair.detach().sum(),
        "chosen reward": rewards[..., 0].sum(),
        "rejected reward": rewards[..., 1].sum(),
        "chosen preferred": (margins > 0).sum(),
    }
    report = {name: torch.stack([counted_once(value.double(), mesh), pairs]) for name, value in figures.items()}
    return of_pair.sum(), pairs, report


class Reference(Observer):
    """Scores all rows before the first step of a run; a resumed run has the numbers from its checkpoint.

    Args:
        state: the run.
        sets: its rows.
    """

    def __init__(self, state: RunState, sets: dict[str, RowDataset]) -> None:
        self.state, self.sets = state, sets

    def begin(self, done: int) -> None:
        if done:
            return
        micro = self.state.run.training.micro_batch_size
        for name, rows in self.sets.items():
            run, what = self.state.run, f"reference, {name} rows"
            scores = log_probs(self.state.model, run.model, rows.batch_of_rows, rows.epoch_rows, micro, what)
            rows.keep(REFERENCE, scores.numpy())
