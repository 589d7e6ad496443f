"""How many bytes a rank holds, before anything runs: layers are run on tensors without memory, and no rank is asked.

| file         | what                                                                                        |
|--------------|---------------------------------------------------------------------------------------------|
| `dry_run`    | one layer of each kind, run on fake tensors: bytes kept, operations, messages               |
| `gpu`        | what computes on a GPU in place of what does on a CPU                                       |
| `prediction` | the memory of a rank: what lasts, what comes and goes, the fullest moment of a step         |

`training/memory_report` and `minimegatron memory` make tables of it.
"""
