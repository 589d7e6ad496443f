"""What a run is: the six configurations together.

`training/arguments` makes a `RunConfig` from a command line; a program or a notebook makes one directly. The rules
between the configurations are in `training/rules`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from minimegatron.config import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    TransformerConfig,
)
from minimegatron.config.fields import Kind

SECTIONS: dict[str, Any] = {
    "model": TransformerConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
}

KINDS: dict[str, Kind] = {f.name: f.metadata["kind"] for cls in SECTIONS.values() for f in dataclasses.fields(cls)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a training run needs to know.

    Attributes:
        model, parallel, optimizer, data, training, checkpoint: the six configurations.
        spec: module and function of `--spec`, or None.
        given: names of the fields that were chosen, as opposed to defaults.
        notes: what the command line asked for that is so anyway; printed once.
    """

    model: TransformerConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    spec: tuple[str, str] | None = None
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def trained_model(self, vocab_size: int) -> TransformerConfig:
        """The model as this run trains it.

        Its vocabulary is the tokenizer's. Positions that have no end are turned as far as the samples reach, so that is
        the `max_position_embeddings` that an export says, unless a larger one was chosen; a default was not.

        Args:
            vocab_size: of the tokenizer, or the larger one that was chosen.
        """
        model, name = self.model, "max_position_embeddings"
        if model.position_embedding_type == "learned_absolute":
            return model.replace(vocab_size=vocab_size)
        longest = getattr(model, name)
        chosen = name in self.given or longest != getattr(TransformerConfig, name)
        longest = max(longest if chosen else 1, self.data.seq_length)
        return model.replace(vocab_size=vocab_size, max_position_embeddings=longest)

    def fields(self) -> dict[str, Any]:
        """Every field of every section; no two have the same name."""
        return {name: value for section in SECTIONS for name, value in getattr(self, section).to_dict().items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what `--config` reads and the log file begins with."""
        sections: dict[str, Any] = {name: getattr(self, name).to_dict() for name in SECTIONS}
        return sections | ({"spec": list(self.spec)} if self.spec else {})
