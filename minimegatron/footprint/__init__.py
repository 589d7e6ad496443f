"""How many bytes a rank holds, before anything runs: layers are run on tensors without memory, and no rank is asked.

| file            | what                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| `tape`          | steps of a pass and what each keeps; the sizes of a microbatch                           |
| `dry_run`       | one layer of each kind, run on fake tensors: bytes kept, products, messages              |
| `gpu`           | what computes on a GPU in place of what does on a CPU                                    |
| `stage`         | a pipeline stage from end to end                                                         |
| `states`        | parameters, main parameters, gradients, moments, by optimizer                            |
| `traffic`       | weights gathered for use and gradients on their way                                      |
| `prediction`    | all of it for a rank: the fullest moment of a step, and its name                         |

`training/memory_report` and `minimegatron memory` make tables of it.
"""
