"""Fused operations, and kernels for them in CUDA C++, which also run on a CPU, thread by thread.

| file               | says                                                                                       |
|--------------------|--------------------------------------------------------------------------------------------|
| `ops.py`           | what layers call: a function for every operation, and the table of what computes it        |
| `plain.py`         | the operations by torch; attention is in `blockwise.py`                                    |
| `reference.py`     | what every kernel computes: the specification, in plain torch, any float dtype             |
| `csrc/*.cu`        | how: plain CUDA with C launchers; each file opens with its ladder of versions              |
| `csrc/device.h`    | what they share; `csrc/emulator.h` is a GPU made of fibers, for `g++`                      |
| `build.py`         | a file becomes a library, once and for all; `toolkit.py`: where nvcc is                  |
| `launch.py`        | calls a launcher with tensors                                                              |
| `norm.py`, ...     | the operators of a kernel file: shape checks, fake tensors, autograd                       |
| `backends.py`      | which of torch, CUDA and the emulator computes, and what stands in the way on this machine |
| `gpu_setup.py`     | `make gpu`: other people's kernels, tried once; `gpu_plan.py`: with which commands         |

Begin with `ops.py`, `reference.py` and `csrc/norm.cu`, and break a kernel: leave out a barrier, run `tests/kernels`.
"""
