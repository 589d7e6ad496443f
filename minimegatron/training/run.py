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

SECTIONS: dict[str, Any] = {
    "model": TransformerConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
}


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

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what `--config` reads and the log file begins with."""
        sections: dict[str, Any] = {name: getattr(self, name).to_dict() for name in SECTIONS}
        return sections | ({"spec": list(self.spec)} if self.spec else {})
