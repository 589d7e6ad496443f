"""Pictures of a parallel program: functions of plain data that return a figure.

| module     | draws                                                                                        |
|------------|----------------------------------------------------------------------------------------------|
| `picture`  | what all share: style, palette, boxes, figures that belong to their caller                   |
| `mesh`     | the grid of ranks, and the groups along any axis                                             |
| `timeline` | who computed and who communicated when; predicted above measured                             |
| `schedule` | a pipeline schedule and its live activations, as SVG and as text                             |
| `memory`   | bytes alive over a step, by owner                                                            |
| `bars`     | amounts made of parts; bytes predicted beside bytes measured; a step's time cause by cause   |
| `curves`   | losses, one curve beside another, what changes with the number of ranks                      |
| `roofline` | how fast a program can be, by what it computes for each byte                                 |
| `pareto`   | time against memory of many layouts, and which of them none other beats                      |
| `load`     | throughput against latency of a server                                                       |

What only labs draw is in `course/figures`.

All of them are static, use the one style file beside this module, and can be read in greyscale: colours differ in
lightness, and what a colour says is also said by a label, a letter or a hatch.
"""
