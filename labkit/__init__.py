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

| in the notebook            | contents                                                                        |
|----------------------------|---------------------------------------------------------------------------------|
| `magics`, `workspace`      | what a cell does, and where its files are                                       |
| `plainly`, `made`          | errors as a learner reads them; names that an earlier cell makes                |
| `ranks`, `warm`            | warm ranks and the supervised `torchrun`, for cells, tests and benchmarks       |
| `unopened`, `guesses`      | a kernel without a lab, prepared by `ipython_startup`; guesses                  |
| `watched`, `hbm`           | messages of a cell's own ranks, for pictures; a memory that counts what moves   |
| `verdict`                  | what `check` shows                                                              |
| `record`, `progress`       | what has been passed, kept from one kernel to the next                          |
| `quiz`, `cards`, `explain` | questions of an interview, and those at the end of a lab                        |
| `said`                     | what quiz, guesses and verdicts say, in the language of the labs                |
| `notes`                    | the notes of a verdict, of phrases in that language                             |

| in a check                 |                                                                                 |
|----------------------------|---------------------------------------------------------------------------------|
| `judge`                    | draw, play, decide: the verdict from plain data, never from the learner         |
| `playing`, `deciding`      | runs the learner's code; references and the verdict                             |
| `settings`                 | the settings in which every exercise on ranks is tried                          |
| `compare`, `parts`         | comparison of an answer in words; which of several outputs is wrong             |
| `suspects`                 | which known mistake a wrong answer is                                           |
| `player`, `evidence`       | the learner's side; what it did, not only what it returned                      |
| `process_group`, `tools`   | gloo, and a log of what passes through it; what a lab's tools tell a check      |
| `fresh`, `plain`           | fresh processes with limits and deadlines; the data that they exchange          |
| `nursery`, `replies`       | the server of fresh processes; their answers and how they end                   |
| `sandbox`                  | limits what a learner's process can do, by `namespaces` and `seccomp`;          |
|                            | `closing` closes modules, `promises` tests all of it on this machine            |

| for a class                |                                                                                 |
|----------------------------|---------------------------------------------------------------------------------|
| `grade`, `grading`         | the command; many submissions through one judge                                 |
| `handed_in`, `submissions` | whose file it is; exercises by name, of cells that `notebook_file` reads        |
| `marks`, `report`          | what is written: marks and feedback; the instructor's page                      |
| `regrade`                  | the same run again, or what has changed since                                   |
| `shown`                    | text of strangers, cleaned for display                                          |
| `acceptance`, `begin`      | a capstone: what is run, held against published criteria; a copy of its start   |
| `program`, `paired`        | a command of a hand-in and its processes; two contenders on a noisy machine     |
| `edits`                    | mistakes that are planted in a program, to try its checks or its tests          |

| for a lab's author         |                                                                                 |
|----------------------------|---------------------------------------------------------------------------------|
| `exercises`, `checks`      | how exercises are declared; judges of evidence                                  |
| `answers`                  | other answers to an exercise, right and wrong, which try its checks             |
| `source`, `build`          | one source for the lab and its solution; both, run and stored                   |
| `languages`                | whether a lab's translation says what its English says                          |
"""
