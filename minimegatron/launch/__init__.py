"""Starting processes, watching them and ending them; `comm` is the communication between them.

| to read                              | its one idea                                                             |
|--------------------------------------|--------------------------------------------------------------------------|
| `rank`                               | a script's first and last line: join the group, leave it together        |
| `torchrun`, `agent`                  | the real `torchrun`, started from a notebook, with what became of it     |
| `fork_server`                        | a process that imports torch once and forks, here and in `labkit`        |
| `workers`                            | warm ranks: a pool that runs a function on all of them                   |
| `warm_client`, `warm_server`, `clean`| its two sides, and what a rank leaves behind between two jobs            |
| `procs`                              | processes with parents that end them                                     |
| `watch`, `blame`, `ledger`           | which rank is late or gone, which one failed first, where ranks meet     |
| `patience`                           | a rank that visibly starts is not missing                                |
| `agreement`                          | ranks compare what they were given before they have a group              |
| `hardware`, `drivers`, `launchers`   | which device and backend; which driver; torchrun's or srun's environment |
| `output`                             | what a command prints, such as `nvidia-smi`                              |
"""
