"""Starting a rank, watching it and ending it; `comm` is the communication between ranks.

| file                  | what it does                                                             |
|-----------------------|--------------------------------------------------------------------------|
| `rank`                | a script's first and last line: join the group, leave it together        |
| `rendezvous`          | torchrun's or srun's environment, and the store where ranks meet         |
| `agreement`           | ranks compare their configuration before they have a group               |
| `hardware`, `drivers` | which device and backend; which NVIDIA driver runs which build of torch  |
| `startup_deadline`    | deadlines that count only time without progress                          |
| `ledger`              | the store as a second way to communicate, for when collectives fail      |
| `watch`               | the thread beside a blocked rank: deaths, Ctrl-C, overdue communications |
| `error_report`        | one traceback for a job, from the rank that failed first                 |
| `procs`               | processes that end with their parents                                    |

Warm ranks and torchrun under supervision, for labs and tests, are in `labkit/ranks`.
"""
