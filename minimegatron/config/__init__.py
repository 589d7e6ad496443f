"""What is trained, how it is laid out, with which numbers: six frozen dataclasses with Megatron's field names.

| class               | says                              | file       | Megatron's counterpart                       |
|---------------------|-----------------------------------|------------|----------------------------------------------|
| `TransformerConfig` | the model, not the machine        | `model`    | `TransformerConfig`, the model's half        |
| `ParallelConfig`    | who holds what                    | `parallel` | `ModelParallelConfig`                        |
| `OptimizerConfig`   | how weights move                  | `run`      | `OptimizerConfig`, `OptimizerParamScheduler` |
| `DataConfig`        | which tokens in which order       | `run`      | `GPTDatasetConfig`                           |
| `TrainingConfig`    | how long, how often, where to log | `run`      | `megatron/training/config`                   |
| `CheckpointConfig`  | what is saved and continued       | `checkpoint` | `megatron/training/config`                 |

A field's comment is its help text on the command line (`minimegatron/training/arguments.py` turns fields into flags).
Every rule that can be checked is checked at construction: a combination that would fail, or silently mean something
else, is refused with the values, the rule and the fix. What must hold between a model and a layout is in `fits.py`.
"""

from minimegatron.config.checkpoint import CheckpointConfig
from minimegatron.config.model import TransformerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.config.run import DataConfig, OptimizerConfig, TrainingConfig

__all__ = ["CheckpointConfig", "DataConfig", "OptimizerConfig", "ParallelConfig", "TrainingConfig", "TransformerConfig"]
