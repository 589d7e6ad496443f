"""The labs' machinery: the magics and functions of a notebook after `%load_ext course`.

    %lab 01_process_groups                        which lab this is (%lab 1 will do); loads what was saved
    %%exercise ring_all_reduce                    the learner's code: defined here, and importable by ranks
    %%needs ring_all_reduce                       a plain cell that waits until this has passed
    check("ring_all_reduce")                      a small table: not done yet, not right yet, passed
    %%torchrun -n 4 --needs ring_all_reduce       the real torchrun on a cell; ranks on CPUs, on every machine
    %%torchrun --gpus 2                           the same on all GPUs of this machine; left out with fewer than 2
    %%ranks 4                                     the same on warm ranks on CPUs, in a fraction of a second
    hint("ring_all_reduce")                       how it can be solved
    progress()                                    all exercises and the sum
    guess("gpus", 12, "How many?")                keeps a guess
    guessed("gpus", 7.3, "GPUs")                  shows it beside the measured number

| module                  | contents                                                                  |
|-------------------------|---------------------------------------------------------------------------|
| `magics`, `workspace`   | what a cell does, and where its files are                                 |
| `plainly`, `made`       | errors as a learner reads them; names that an earlier cell makes          |
| `unopened`, `guesses`   | a kernel without a lab; guesses                                           |
| `ranks`                 | warm ranks and the supervised `torchrun`, for cells, tests and benchmarks |
| `exercises`, `checks`   | how a lab's author declares exercises; judges of evidence                 |
| `compare`, `parts`      | comparison of an answer in words; which of several outputs is wrong       |
| `judge`                 | draw, play, decide: the verdict from plain data, never from the learner   |
| `playing`, `deciding`   | runs the learner's code; references and the verdict                       |
| `settings`              | the settings in which every exercise on ranks is tried                    |
| `player`, `evidence`    | the learner's side; what it did, not only what it returned                |
| `process_group`         | gloo, and a log of what passes through it                                 |
| `tools`                 | what the tools of a lab exchange with a check                             |
| `fresh`, `plain`        | fresh processes with limits and deadlines; the data that they exchange    |
| `nursery`, `replies`    | the server of fresh processes; their answers and how they end             |
| `hbm`                   | a memory that counts what is moved                                        |
| `shown`                 | text of strangers, cleaned for display                                    |
| `sandbox`               | limits what a learner's process can do, by `namespaces` and `seccomp`;    |
|                         | `closing` closes modules, `promises` tests all of it on this machine      |
| `record`, `progress`    | what has been passed, kept from one kernel to the next                    |
| `grade`                 | a folder of submissions: `submissions`, `grading`, `marks`, `report`      |
| `acceptance`            | a capstone: what is run, held against published criteria; `begin` copies  |
|                         | its start, `program` is a command of a hand-in and its processes          |
| `paired`                | two contenders on a noisy machine, by CPU-seconds                         |
| `quiz`, `cards`         | questions of an interview; `explain`: those at the end of a lab           |
| `build`, `pictures`     | one source for the lab and its solution; stored pictures in few bytes     |
| `said`                  | what quiz, guesses and verdicts say, in the language of the labs          |
| `languages`             | whether a translation says what its English says                          |
| `answers`               | other answers to a lab's exercises, right and wrong, which test its checks     |
"""
