"""Pictures of a parallel program: functions of plain data that return a figure.

| module     | draws                                                                                        |
|------------|----------------------------------------------------------------------------------------------|
| `picture`  | shared parts: style, palette, boxes, figures that belong to their caller                     |
| `mesh`     | the grid of ranks, and the groups along any axis                                             |
| `timeline` | computation and communication of ranks over time; predicted above measured                   |
| `schedule` | a pipeline schedule and its live activations, as SVG and as text                             |
| `memory`   | bytes alive over a step, by owner                                                            |
| `bars`     | amounts made of parts; bytes predicted beside bytes measured; a step's time part by part     |
| `curves`   | losses, one curve beside another; curves over the number of ranks                            |
| `roofline` | the bound on a program's speed by its FLOPs a byte                                           |
| `pareto`   | time against memory of many layouts, and the Pareto front                                    |
| `load`     | throughput against latency of a server                                                       |
| `merged_trace` | one trace of all ranks for Perfetto, which draws it                                      |

Drawings of single labs are in `course/figures`.

All of them are static, use the one style file beside this module, and can be read in greyscale: colours differ in
lightness, and a label, a letter or a hatch has the meaning of each colour as well.
"""
