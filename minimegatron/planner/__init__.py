"""Memory, messages and time of a run on a cluster, before anything runs; and the search for a layout.

| file           | what                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| `cluster`      | rates of GPUs and links: A100, H100, H200, B200, a file, this machine                  |
| `measure`      | this machine's rates, and those of each operation of a step, timed                     |
| `closed_forms` | formulas that papers print, and the attention of papers before 2023                    |
| `traffic`      | every communication of a step on one rank                                              |
| `update`       | bytes, products and messages of the optimizer                                          |
| `pass_time`    | the time of a microbatch in a stage, from rooflines and links                          |
| `timing`       | the time of a step: the schedule simulated, and what is around the passes              |
| `planning`     | a run's memory, messages and time; whether it fits, and which changes make it fit      |
| `layouts`      | the layouts of a search                                                                |
| `search`       | all layouts estimated, pruned by memory, ranked by time                                |
| `report`       | a plan as text                                                                         |
| `pictures`     | a plan as pictures, and the memory of every stage over a step                          |

`footprint` runs the layers and gives their bytes, operations and messages. `minimegatron plan` prints a plan.
"""
