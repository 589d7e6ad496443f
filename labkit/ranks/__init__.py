"""Ranks for notebooks, tests and benchmarks: warm ones in milliseconds, and the real `torchrun` under supervision.

| module        | contents                                                                         |
|---------------|----------------------------------------------------------------------------------|
| `pool`        | warm ranks: runs a function on all of them, again and again                      |
| `worker`      | a warm rank: runs jobs, and restores its process between two of them             |
| `fork_server` | a process that imports torch once and forks on request                           |
| `torchrun`    | starts `torchrun` from a notebook, ends a hang, and explains a failure           |
| `agent`       | `torchrun` in a process that leaves nothing behind: `minimegatron torchrun`      |
"""
