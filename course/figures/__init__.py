"""What the labs draw beside the package's own pictures (`minimegatron/viz`): a module for each lab, functions of plain
data that return a `Picture`.

| module             | lab | draws                                                                                 |
|--------------------|-----|---------------------------------------------------------------------------------------|
| `process_groups`   | 01  | collectives before and after, an all-reduce on a ring, which rank reads which sample  |
| `tensor_parallel`  | 02  | cut products and weights, f and g, the regions of a layer, messages, shards as images |
| `pipelines`        | 03  | placements of stages, a deadlock, a schedule beside its run, memory against bubble    |
| `context_parallel` | 04  | which rank holds which tokens, the running softmax, the ring of keys and values       |
| `experts`          | 05  | which token goes to which expert, the load over time, a dispatch row by row           |
| `data_parallel`    | 06  | the stages of ZeRO, a flat buffer with its buckets, gathers hidden and waited for     |
| `kernels`          | 07  | a launch on a GPU, memory accesses, reductions, tiles, numbers of few bits            |
| `checkpoints`      | 08  | which rank holds which part of a tensor, what a crash leaves                          |
| `inference`        | 10  | pages and tables, what a step computes, seats, shares of tokens, tokens a second     |
| `posttraining`     | 11  | which tokens count, what a token of each row weighs, curves, the loop of rewards      |
| `planning`         | 12  | what divides what, published runs beside predictions                                  |
| `counts`           | all | how many GPUs something fills, how a cost grows with the number of ranks              |

Some of them compute what an exercise asks for, so they are closed (`course.CLOSED`) to the programs that labs judge.
"""
