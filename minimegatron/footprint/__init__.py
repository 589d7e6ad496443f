"""How many bytes a rank holds, by arithmetic: no tensor is made, and no rank is asked.

| file            | whose bytes                                                                              |
|-----------------|------------------------------------------------------------------------------------------|
| `tape`          | what all formulas are written in: steps, tapes, the sizes of a microbatch, the registry  |
| `dense`         | norms, linear layers in the model's precision and in FP8, the MLP, embedding, loss       |
| `attention`     | self-attention and multi-latent attention, each program that computes them, cp           |
| `experts`       | router, dispatchers, experts, shared experts                                             |
| `stage`         | transformer layers, recompute, prediction of several tokens: a stage from end to end     |
| `dry_run`       | a stage run on fake tensors: layers that have no formula                                 |
| `states`        | parameters, main parameters, gradients, moments, by optimizer                            |
| `traffic`       | weights gathered for use and gradients on their way                                      |
| `prediction`    | all of it for a rank: the fullest moment of a step, and its name                         |

`training/memory_report` and `minimegatron memory` make tables of it.
"""
