"""Starting processes, watching them and ending them; `comm` is the communication between them.

| to read                              | its one idea                                                             |
|--------------------------------------|--------------------------------------------------------------------------|
| `rank`                               | a script's first and last line: join the group, leave it together        |
| `procs`                              | processes with parents that end them                                     |
| `watch`, `blame`, `ledger`           | which rank is late or gone, which one failed first, where ranks meet     |
| `patience`                           | a rank that visibly starts is not missing                                |
| `agreement`                          | ranks compare what they were given before they have a group              |
| `hardware`, `drivers`, `launchers`   | which device and backend; which driver; torchrun's or srun's environment |
| `output`                             | what a command prints, such as `nvidia-smi`                              |
"""
