"""The configuration of a run: six frozen dataclasses with Megatron's field names, and one that holds them all.

| class               | says                              | file        | Megatron's counterpart                       |
|---------------------|-----------------------------------|-------------|----------------------------------------------|
| `TransformerConfig` | the model, not the machine        | `model`     | `TransformerConfig`, the model's half        |
| `ParallelConfig`    | how ranks divide the work         | `parallel`  | `ModelParallelConfig`                        |
| `OptimizerConfig`   | how weights are updated           | `optimizer` | `OptimizerConfig`, `OptimizerParamScheduler` |
| `DataConfig`        | which tokens in which order       | `run`       | `GPTDatasetConfig`                           |
| `TrainingConfig`    | how long, how often, where to log | `run`       | `megatron/training/config`                   |
| `CheckpointConfig`  | what is saved and loaded          | `run`       | `megatron/training/config`                   |
| `RunConfig`         | all six together                  | `run`       | `args`                                       |

A field's description is its help text on the command line (`training/arguments` turns fields into flags). Every rule
that can be checked is checked at construction: a combination that would fail, or silently mean something else, is
refused with the values, the rule and the fix. Rules between a model and a layout are in `fits.py`.
"""

from minimegatron.config.model import TransformerConfig
from minimegatron.config.optimizer import OptimizerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.config.run import CheckpointConfig, DataConfig, RunConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainingConfig",
    "TransformerConfig",
]
