"""What is trained, how it is laid out, with which numbers: six frozen dataclasses with Megatron's field names.

| class               | says                              | file        | Megatron's counterpart                       |
|---------------------|-----------------------------------|-------------|----------------------------------------------|
| `TransformerConfig` | the model, not the machine        | `model`     | `TransformerConfig`, the model's half        |
| `ParallelConfig`    | who holds what                    | `parallel`  | `ModelParallelConfig`                        |
| `OptimizerConfig`   | how weights move                  | `optimizer` | `OptimizerConfig`, `OptimizerParamScheduler` |
| `DataConfig`        | which tokens in which order       | `run`       | `GPTDatasetConfig`                           |
| `TrainingConfig`    | how long, how often, where to log | `run`       | `megatron/training/config`                   |
| `CheckpointConfig`  | what is saved and loaded          | `run`       | `megatron/training/config`                   |
| `RunConfig`         | all six together                  | `run`       | `args`                                       |

A field's description is its help text on the command line (`training/arguments` turns fields into flags). Every rule
that can be checked is checked at construction: a combination that would fail, or silently mean something else, is
refused with the values, the rule and the fix. What must hold between a model and a layout is in `fits.py`.
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
