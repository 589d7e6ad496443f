"""Pictures of a parallel program: who holds what, what travels, when. Functions of plain data that return a Figure.

| module       | draws                                                                       |
|--------------|-----------------------------------------------------------------------------|
| `mesh`       | the grid of ranks, the groups along any axis, which rank holds which shard   |
| `collective` | each collective before and after                                            |
| `timeline`   | who computed and who communicated when; predicted above measured            |
| `schedule`   | a pipeline schedule and its live activations, as SVG and as text             |
| `sequence`   | which rank holds which tokens, and the causal work that this gives it        |
| `experts`    | which token goes to which expert, and how the load is shared over time      |
| `volume`     | bytes predicted beside bytes measured                                       |
| `roofline`   | how fast a program can be, by what it computes for each byte                |
| `cuda`       | grid, block, warp and thread, and the memories that they see                |
| `access`     | what the threads of a warp ask memory for, and what is fetched              |
| `reduction`  | a sum as a tree in shared memory, and as a butterfly of shuffles            |
| `tiles`      | attention scores tile by tile; a tensor with a scale for each tile          |
| `numbers`    | the numbers of a format; errors of casts, recipe by recipe                  |

All of them are static, use the one style file beside this module, and can be read in greyscale: colours differ in
lightness, and what a colour says is also said by a label, a letter or a hatch.
"""
