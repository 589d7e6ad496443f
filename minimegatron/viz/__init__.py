"""Pictures of a parallel program: who holds what, what travels, when. Functions of plain data that return a Figure.

| module       | draws                                                                       |
|--------------|-----------------------------------------------------------------------------|
| `mesh`       | the grid of ranks, the groups along any axis, which rank holds which shard   |
| `collective` | each collective before and after                                            |
| `ring_reduce`| an all-reduce on a ring, step by step                                        |
| `filled`     | how many GPUs something fills                                                |
| `growth`     | how a cost grows with the number of ranks: formulas and counts              |
| `stream`     | which rank reads which sample                                                |
| `timeline`   | who computed and who communicated when; predicted above measured            |
| `schedule`   | a pipeline schedule and its live activations, as SVG and as text             |
| `placement`  | which rank holds which stages of a pipeline, and the way of a microbatch     |
| `deadlock`   | lists of a pipeline that wait for each other, and the circle in which        |
| `paired`     | a pipeline's plan and what was done, rank by rank on one axis                |
| `trade_off`  | schedules by the activations they keep and the bubble they have             |
| `sequence`   | which rank holds which tokens, the causal work of that; heads for tokens     |
| `softmax`    | the running softmax of one row, with numbers to check by hand               |
| `ring`       | a ring of keys and values: whose block, and what of it is visible            |
| `experts`    | which token goes to which expert, and how the load is shared over time      |
| `dispatch`   | the rows of a mixture of experts on their way to the experts and back       |
| `volume`     | bytes predicted beside bytes measured                                       |
| `buckets`    | a flat buffer: parameters, padding, buckets, and which rank owns what        |
| `zero_stages`| what a rank keeps in the stages of ZeRO, as areas and in bytes              |
| `gathers`    | weights that come on use: gathers that are hidden, and those waited for     |
| `memory`     | bytes alive over a step, by owner                                           |
| `waterfall`  | how one amount of time becomes a longer one, cause by cause                 |
| `pareto`     | time against memory of many layouts, and which of them none other beats     |
| `factors`    | what divides what: predicted and computed                                   |
| `agreement`  | published runs beside what was predicted of them                            |
| `region_map` | which rank holds which numbers of a tensor, in one layout and in another    |
| `crashes`    | what can be found after a crash at each change that a save makes            |
| `roofline`   | how fast a program can be, by what it computes for each byte                |
| `cuda`       | grid, block, warp and thread, and the memories that they see                |
| `access`     | what the threads of a warp ask memory for, and what is fetched              |
| `reduction`  | a sum as a tree in shared memory, and as a butterfly of shuffles            |
| `tiles`      | attention scores tile by tile; a tensor with a scale for each tile          |
| `numbers`    | the numbers of a format; errors of casts, recipe by recipe                  |

All of them are static, use the one style file beside this module, and can be read in greyscale: colours differ in
lightness, and what a colour says is also said by a label, a letter or a hatch.
"""
