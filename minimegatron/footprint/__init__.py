"""How many bytes a rank holds, before anything runs: its layers run on tensors without memory, in one process.

| file         | what                                                                                        |
|--------------|---------------------------------------------------------------------------------------------|
| `events`     | what a recording consists of: operations and messages, in windows and phases                |
| `recorder`   | records bytes alive, operations and messages while modules run                              |
| `gpu`        | the operators of a GPU in place of a CPU's, and FLOPs of operators                          |
| `dry_run`    | a stage, run on fake tensors: bytes kept, operations, messages                              |
| `kinds`      | a stage from runs of one layer of each kind; model FLOPs                                    |
| `shapes`     | shapes of results on `meta`, without torch's compiler                                       |
| `states`     | what a rank holds from step to step: parameters, gradients, optimizer state                 |
| `travel`     | gathered weights and gradients under way, while each part runs                              |
| `prediction` | the fullest moment of a step, and all bytes of a rank by owner                              |

`training/memory_report` and `minimegatron memory` print the prediction.
"""
