"""Fused operations, and kernels for them in CUDA C++, which also run on a CPU, thread by thread.

| file                | contents                                                                                   |
|---------------------|--------------------------------------------------------------------------------------------|
| `ops.py`            | what layers call: a function for every operation, with its contract                        |
| `interfaces.py`     | masks, and operations that are objects: what each implementation of them has               |
| `choice.py`         | the table of implementations, and which of them computes                                   |
| `plain.py`          | the operations by torch; attention is in `blockwise.py`                                    |
| `reference.py`      | the specification of every kernel, in plain torch, any float dtype                         |
| `csrc/*.cu`         | the kernels: plain CUDA with C launchers; each file opens with its ladder of versions      |
| `csrc/device.h`     | shared device code; `csrc/emulator.h` emulates a GPU with fibers, for `g++`                |
| `csrc/*.cpp`        | kernels for CPUs: twins of `norm.cu` and others, with the same launchers, for training;    |
|                     | pages, few rows and packed weights for generation; `csrc/vector.h`                         |
| `build.py`          | compiles a file into a library, once; `toolkit.py` finds nvcc                              |
| `products.py`       | matrix products on a CPU, by MKL or oneDNN                                                 |
| `operators.py`      | calls a launcher with tensors; makes torch operators of launchers                          |
| `pointwise.py`, ... | the operators of one or more kernel files: shape checks, fake tensors, autograd            |
| `gpu_setup.py`      | `make gpu`: Transformer Engine and flash-attn                                              |

Begin with `ops.py`, `reference.py` and `csrc/norm.cu`, and break a kernel: leave out a barrier, run `tests/kernels`.
"""
