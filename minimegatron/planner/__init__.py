"""Memory, messages and time of a run on a cluster, before anything runs; and which layout to take.

| file           | what                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| `cluster`      | what GPUs and links are: A100, H100, H200, B200, a file, this machine                  |
| `measure`      | this machine and each operation of a step on it, timed                                 |
| `closed_forms` | the formulas that papers print, and the attention that papers before 2023 had          |
| `traffic`      | every communication of a step on one rank                                              |
| `update`       | what the optimizer touches, multiplies and sends                                       |
| `timing`       | rooflines, links and the schedule played: the time of a step                           |
| `planning`     | all of it for a run; whether it fits, and what would make it fit                       |
| `layouts`      | the points of a search                                                                 |
| `search`       | all layouts estimated, pruned by memory, ranked by time                                |
| `report`       | tables                                                                                 |
| `pictures`     | the same as pictures, and the memory of every stage over a step                        |

Bytes of memory, operations and messages of layers are `footprint`'s. `minimegatron plan` prints a plan.
"""
