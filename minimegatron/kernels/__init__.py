"""Fused kernels in CUDA C++, which also run on a CPU, thread by thread.

| file               | says                                                                                       |
|--------------------|--------------------------------------------------------------------------------------------|
| `reference.py`     | what every kernel computes: the specification, in plain torch, any float dtype             |
| `csrc/*.cu`        | how: plain CUDA with C launchers; each file opens with its ladder of versions              |
| `csrc/device.h`    | what they share; `csrc/emulator.h` is a GPU made of fibers, for `g++`                      |
| `build.py`         | a file becomes a library, once and for all; `toolkit.py`: where nvcc is                  |
| `launch.py`        | calls a launcher with tensors                                                              |
| `ops.py`           | all operators; each family has a file beside it (shape checks, fake tensors, autograd)     |
| `gpu_setup.py`     | `make gpu`: other people's kernels, tried once; `gpu_plan.py`: with which commands         |
| `switch.py`        | which of torch, CUDA and the emulator computes: what layers ask                            |
| `families.py`      | which kernels can be had on this machine, and one line where a backend cannot be had          |

Begin with `csrc/norm.cu` and `reference.py`, and break a kernel: leave out a barrier, and run `tests/kernels`.
"""
