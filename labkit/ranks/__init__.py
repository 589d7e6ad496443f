"""Ranks for notebooks, tests and benchmarks: warm ones in milliseconds, and the real `torchrun` under supervision.

| module        | contents                                                                         |
|---------------|----------------------------------------------------------------------------------|
| `pool`        | warm ranks: runs a function on all of them, again and again                      |
| `worker`      | what a warm rank does, and how it puts its process in order between two jobs     |
| `fork_server` | a process that imports torch once and forks servers, which fork on request      |
| `torchrun`    | starts `torchrun` from a notebook, ends a hang, and explains a failure           |
| `agent`       | `torchrun` in a process that leaves nothing behind: `minimegatron torchrun`      |
| `early`       | ranks of `torchrun` that are forked, so that torch is imported once              |
"""
