"""Supervised fine-tuning: pre-training's loss on the tokens that the assistant spoke.

Everything that differs from pre-training is in the data: the mask (`conversations`) and the rows (`rows`). The loss is
the mean over all counted tokens of a step, over ranks and microbatches, so a conversation with a long answer weighs
more than one with a short answer, however they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.posttraining.conversations import Encoder, Tokens
from minimegatron.posttraining.data import load_rows
from minimegatron.posttraining.rows import RowDataset
from minimegatron.training.datasets import Joint, RunData
from minimegatron.training.observers import Observer
from minimegatron.training.run_state import RunState
from minimegatron.training.task import Task


class SFT(Task):
    """Conversations of which the assistant's tokens count."""

    prefers = False

    def form(self, encoder: Encoder, line: Mapping[str, Any]) -> list[Tokens]:
        """The sequences of a line."""
        return encoder.conversation(line)

    def load_data(
        self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
    ) -> RunData:
        """Rows of `--data-path FILE.jsonl ...` or of `--examples` (`posttraining/data`)."""
        return load_rows(run, mesh, num_samples, self.form, self.prefers, quiet)

    def begin(self, state: RunState, data: RunData, say: Callable[[str], None]) -> Sequence[Observer]:
        """Say what the rows hold."""
        train = data.train
        assert isinstance(train, RowDataset)
        items, counted = train.items, int(train.items.counts.sum())
        say(
            f"examples: {len(items)} in {train.epoch_rows} rows of {train.sequence_length} tokens, "
            f"{100 * train.fill:.0f} % full; {counted} of {len(items.ids)} tokens count"
        )
        if items.cut or items.left_out:
            say(
                f"too long for --seq-length {train.sequence_length}: {items.cut} lost their end, and so the tokens "
                f"that teach to stop; {items.left_out} were left out, because nothing of them would count"
            )
        return ()
