"""After pre-training: tasks that begin with a model and teach it by examples, by preferences or by rewards.

A task (`training/task`) says which samples there are and which loss a microbatch has. The trainer, the layouts, the
optimizer and the checkpoints are those of pre-training.

| file            | holds                                                                                     |
|-----------------|-------------------------------------------------------------------------------------------|
| `conversations` | a JSONL line, through the chat template, to ids and to the tokens that the loss counts     |
| `examples`      | conversations that every machine has: questions about docstrings, sums                    |
| `rows`, `data`  | sequences in rows of s tokens, packed or not; the training set of files of lines          |
| `sequences`     | sums over the tokens of each sequence, in every layout                                    |
| `scoring`       | log-probabilities of given tokens, by a model in any layout, without a gradient           |
| `preferences`   | losses of pairs of answers: DPO and its relatives                                         |
| `policy`        | advantages, ratios, clipping; what a loss of tokens is divided by                         |
| `environments`  | what is asked, and what an answer is worth                                                |
| `programs`, `limited`, `limited_child` | functions to be written; an answer that is run, and what it may use |
| `rollouts`      | answers drawn by the engine in a layout of its own, as a training set                     |
| `on_policy`     | rows whose answers the student draws, for a teacher to score                              |
| `importance`    | what each part of a model gives to the rest on a text                                     |
| `prune`         | the parts that give most, as a smaller model; no task                                     |
| `sft`, `vlm`, `dpo`, `reward`, `grpo`, `ppo`, `distill` | the tasks; `tasks` has them by the names of their commands |
"""
