"""How many bytes a rank holds, before anything runs: its layers run on tensors without memory, in one process.

| file         | what                                                                                        |
|--------------|---------------------------------------------------------------------------------------------|
| `dry_run`    | one layer of each kind, run on fake tensors: bytes kept, operations, messages               |
| `gpu`        | the operators of a GPU in place of a CPU's, and the FLOPs of an operator                    |
| `prediction` | the memory of a rank: what lasts, what comes and goes, the fullest moment of a step         |

`training/memory_report` and `minimegatron memory` make tables of it.
"""
