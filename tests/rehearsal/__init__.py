"""A GPU that is not there: real programs on simulated devices, checked and counted.

The problem in a sentence: on a machine without a GPU every test computes on the CPU, where a tensor in the wrong place,
a hidden wait of the host or a launch too many cannot be seen; and a machine with one is where they cost the most.

So a process is given devices. Its tensors say `cuda:N` and hold real numbers in CPU memory; every operator on them
passes through one function that asks whether CUDA would do this, counts the launch and the wait, and lets the CPU
compute. Losses come out as on the CPU, to rounding, so a rehearsal is also a test of the numbers.

    from tests.rehearsal import rehearse

    result = rehearse('''
    import torch
    from minimegatron.launch.rank import report
    x = torch.ones(3, device="cuda")
    report((x + 1).sum().item())
    ''')
    assert result.report == 6
    assert result.record.count("waits", containing="item") == 1

`rehearse(script, nproc, gpus)` runs a text, a file or a module on one or several ranks; what a rank reports, prints and
does to its device comes back (`api.py`). `gpus=0` runs the same without a device, for comparison. A script names parts
of the record by `with RECORD.phase("step")`. Nothing is simulated outside of such processes.

| simulated                                                                               | in                     |
|-----------------------------------------------------------------------------------------|------------------------|
| several devices, each rank on its own; the current device of each thread                | `guard.cpp`, `runtime` |
| refused: tensors of several devices in one operator, also in the project's kernels      | `rules`, `kernels`     |
| refused: CPU tensors, tensors with holes, another rank's GPU in a group of NCCL         | `messages`             |
| refused: `.numpy()`; products of integers; a generator of another device                | `tensor`, `rules`      |
| refused: operands of `_scaled_mm` and `grouped_mm` that do not fit                      | `operators`            |
| refused: whatever makes the host wait, and messages, while a graph is captured          | `capture`              |
| counted: launches, by operator                                                          | `dispatch`             |
| counted: host waits by file and line: `item`, `tolist`, printing, copies to the host    | `dispatch`, `tensor`   |
| and from pageable memory; sizes that depend on data, boolean masks; `synchronize`,      | `rules`, `runtime`     |
| `work.wait` with a timeout, barriers, what object collectives do                        | `messages`             |
| pinned memory: a copy with `non_blocking` is no wait, and without it is one             | `guard.cpp`            |
| an index out of range is a device-side assert                                           | `dispatch`             |
| a captured CUDA graph does nothing; played, it does everything again on the same memory | `capture`, `runtime`   |
| a generator a device: what is drawn on a GPU does not move the CPU's numbers            | `generators`           |
| `torch.cuda.synchronize()` waits for posted receives, for ever if their sender waits    | `messages`             |
| which attention kernel a GPU would choose; the functions of `flash_attn`                | `operators`            |
| the project's CUDA kernels, thread by thread                                            | `kernels`              |

| not simulated            | consequence                                                                               |
|--------------------------|-------------------------------------------------------------------------------------------|
| time of streams          | everything is done when it is told; a missing wait between streams is not seen            |
| NCCL's order of messages | gloo's is more lenient; another test plays schedules against NCCL's rules                 |
| memory                   | `memory_allocated` is 0, nothing runs out, freeing waits for nobody                       |
| speed                    | a launch counts 1, whatever it does; torch may need two kernels for one operator          |
| rounding                 | the CPU's; sums of a GPU have another order, tensor cores another accumulator             |
| errors that come later   | an assert on the device is raised at once, a real one at the next wait                    |
| libraries                | Transformer Engine; cuBLAS and cuDNN beyond the rules above                               |

A line of the record is where Python waited. On the autograd engine's thread only Python functions have a line.

How: torch asks a *device guard* and *hooks*, which a CPU build lacks, before autograd may touch a tensor of CUDA;
`guard.cpp` has both, is compiled once by g++ (`guard.py`) and loaded before torch (`boot.py`). Tensors are a subclass
with `__torch_dispatch__` (`tensor.py`), and a dispatch mode sends operators without such a tensor there as well.
"""

from tests.rehearsal.api import Rank, Rehearsal, RehearsalFailed, rehearse

__all__ = ["Rank", "Rehearsal", "RehearsalFailed", "rehearse"]
