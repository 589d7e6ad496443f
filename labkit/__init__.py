"""The labs' machinery: what a notebook says after `%load_ext course`.

    %lab 01_process_groups                        which lab this is (%lab 1 will do); loads what was saved
    %%exercise ring_all_reduce                    the learner's code: defined here, and importable by ranks
    %%needs ring_all_reduce                       a plain cell that waits until this has passed
    check("ring_all_reduce")                      a small table: not done yet, not right yet, passed
    %%torchrun -n 4 --needs ring_all_reduce       the real torchrun on a cell; ranks on CPUs, on every machine
    %%torchrun --gpus 2                           the same on all GPUs of this machine; left out with fewer than 2
    %%ranks 4                                     the same on warm ranks on CPUs, in a fraction of a second
    progress()                                    all exercises and the sum
    guess("gpus", 12, "How many?")                a number from the gut, kept
    guessed("gpus", 7.3, "GPUs")                  the same beside what was measured

| to read                 | its one idea                                                              |
|-------------------------|---------------------------------------------------------------------------|
| `magics`, `workspace`   | what a cell does, and where its files are; `options` of its first line    |
| `plainly`, `made`       | errors as a learner reads them; names that a cell above makes             |
| `unopened`, `guesses`   | a kernel without a lab; guesses                                           |
| `ranks`                 | warm ranks and the supervised `torchrun`, for cells, tests and benchmarks |
| `exercises`, `checks`   | how a lab's author declares exercises; judges of evidence                 |
| `compare`, `parts`      | is this answer right, in words; which of several outputs is not           |
| `judge`                 | draw, play, decide: the verdict from plain data, never from the learner   |
| `playing`, `deciding`   | the learner's code called, an outcome a trial; references and the verdict |
| `player`, `evidence`    | the learner's side; what it did, not only what it returned                |
| `fresh`, `plain`        | fresh processes with limits and deadlines; the data that crosses          |
| `bounded_json`, `shown` | what a stranger sends: parsed at a bounded cost, and shown clean          |
| `nursery`, `replies`    | how they live; what becomes of them                                       |
| `cuda`, `cuda_text`     | a learner's kernel in CUDA C++, on a CPU too; what is made of its text    |
| `cuda_lex`,             | its words,                                                                |
| `cuda_types`,           | names and types,                                                          |
| `cuda_expressions`,     | expressions,                                                              |
| `cuda_statements`,      | statements,                                                               |
| `cuda_parse`            | whole text: what a kernel may say, and C++ for the emulator made of it    |
| `emulator`              | a compiled kernel, launched: what it did to each array, and what failed   |
| `hbm`                   | a memory that counts                                                      |
| `disk`, `disk_service`, | a disk that forgets what it has not confirmed; the judge's, with a killer; |
| `killer`                | a real process that dies at its n-th change of real files                 |
| `small_run`             | a training run small enough to look at every part of its state            |
| `beside`,               | the judge's own process beside a learner's: launches and memory happen    |
| `kernel_service`        | there                                                                     |
| `sandbox`               | what such a process may do to the machine: compute; `namespaces`,         |
|                         | `landlock`, `seccomp`: by which means; `promises`: whether they hold here |
| `record`, `progress`    | what has been passed, kept from one kernel to the next                    |
| `grade`                 | a folder of submissions: `submissions`, `grading`, `marks`, `report`      |
| `acceptance`            | a capstone: what is run, held against published criteria                  |
| `build`, `pictures`     | one source for the lab and its solution; stored pictures in few bytes     |
| `answers`               | other answers to a lab's exercises, right and wrong: they try its checks  |
"""
