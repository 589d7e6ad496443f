# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 07 · Kernels, flash attention and FP8
#
# The labs before cut a model over many GPUs. This one looks inside one of them. Most operations of a transformer wait
# for memory, not for arithmetic. So you move less: you write a fused kernel in CUDA C++, build flash attention by
# counting bytes, and store numbers in eight bits. You need no GPU: the kernels run here, thread by thread.
#
# | part | sections | you build | time |
# |---|---|---|---|
# | A | 1, 2, 3 to a model that trains | a prediction, a first kernel, RMSNorm four times, its backward pass | 3–4 h |
# | B | 3, flash attention | the bytes of attention, and attention tile by tile | 1–2 h |
# | C | 3, FP8, to the end | a cast to FP8, scales, an FP8 linear layer that trains on two ranks; a bug to find | 3 h |
#
# **Before:** tensor parallelism (lab 02) for part C, the online softmax (lab 04) for part B. You should read loops and
# arrays in C; you need not know C++ or CUDA. Mathematics: powers of two, exponentials, logarithms.
#
# **After a kernel restart:** run the first cell, then go on where you were; where a cell says that a name is missing,
# run the cell that it names. At the end of part A and of part B there is a good place to stop.

# %%
# %load_ext course
# %lab 07_kernels_flash_fp8

# %% [markdown]
# A guess before you know anything: attention over 65,536 tokens, one head of 128 numbers, in bf16. *Three operations*
# write the scores, write the softmax of the scores, and read both again. *Flash attention*, in blocks of 128 queries,
# writes neither. How many times fewer bytes does it move?

# %%
guess("bytes", None, "How many times fewer bytes does flash attention move?")  # put your number in place of None

# %% [markdown]
# ## 1 · The problem
#
# Every transformer layer has two norms. RMSNorm divides each row of x by the root of its mean square, and multiplies
# column i by γᵢ. (`eps`, a small number under the root, keeps a row of zeros from a division by 0.) Here it is as one
# would write it:
#
#     squares = x.pow(2)
#     rstd = (squares.mean(-1, keepdim=True) + eps).rsqrt()
#     y = (x * rstd) * gamma
#
# How many times the size of x do these operations read and write, all together? The folded cell counts the bytes of
# the tensors that go into each operation of torch, and of those that come out.

# %%
guess("passes", None, "How many times the bytes of x does the norm move, read and written?")

# %% jupyter={"source_hidden": true}
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Moves(TorchDispatchMode):
    """Bytes that every operation reads and writes."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in (*args, out) if isinstance(t, torch.Tensor))
        return out


# %%
import torch

from minimegatron.viz.bars import byte_bars


def rms_norm(x, gamma, eps=1e-5):
    squares = x.pow(2)
    rstd = (squares.mean(-1, keepdim=True) + eps).rsqrt()
    return (x * rstd) * gamma


x, gamma = torch.randn(2048, 4096), torch.randn(4096)
with Moves() as moves:
    rms_norm(x, gamma)
print(f"x has {x.nbytes / 2**20:.0f} MiB")
guessed("passes", round(sum(moves.bytes.values()) / x.nbytes, 1), "times the bytes of x")
display(byte_bars({}, moves.bytes, title="One norm, operation by operation", what="read and written"))

# %% [markdown]
# Seven times. Each operation reads its input from memory and writes its result back, where the next one reads it
# again: torch calls this *eager*. (The bar of `mul` is two operations.) One program on the GPU, a *kernel*, could do
# all of them: read a row, keep it on the chip, and write the result, two times. Such a kernel is called *fused*. The
# arithmetic is the same. If memory is what the norm waits for, the fused norm is 3.5 times faster. Section 5 measures
# how much of this factor your CPU gives; section 4 measures the factor itself, on a machine with a GPU.
#
# ## 2 · Predict
#
# ### Memory, arithmetic, or the launch?
#
# What does a kernel wait for? A GPU computes at most `peak` FLOP/s and moves at most `bandwidth` bytes/s. At best it
# does both at the same time. The **arithmetic intensity** of a program is its FLOP per byte. Compare it with
# peak/bandwidth, the machine's *ridge*: below it memory is the bound, from it on arithmetic.
#
# There is a third bound. The CPU *launches* kernels one by one, which takes some microseconds each, while the GPU runs
# those before. (NVIDIA's *Getting Started with CUDA Graphs*, 2019, measures 3.8 µs from C++; an operation of torch in
# Python takes more.) In a long series of equal kernels a kernel takes at least `launch` seconds, however little it
# does.
#
# By hand: 4 GFLOP and 2 GB on a machine with 1000 TFLOP/s and 4 TB/s. To compute takes 4 µs, to move takes 500 µs. So
# it takes 500 µs at best, and the bound is memory. The intensity is 2 FLOP a byte, the ridge is 250. With a thousandth
# of both, 0.004 µs and 0.5 µs, it takes the 5 µs of its launch.
#
# **Exercise.** The intensity, the seconds at best of a kernel in a long series of equal ones, and the bound:
# `"memory"`, `"arithmetic"`, or `"launch"` where the launch takes longer than both.

# %%
# %%exercise at_best
def at_best(flops: float, nbytes: float, peak: float, bandwidth: float, launch: float) -> dict[str, object]:
    """{"intensity": ..., "seconds": ..., "bound": ...}"""
    ### BEGIN SOLUTION
    computing, moving = flops / peak, nbytes / bandwidth
    bound = "launch" if launch > max(computing, moving) else "memory" if moving > computing else "arithmetic"
    return {"intensity": flops / nbytes, "seconds": max(computing, moving, launch), "bound": bound}
    ### END SOLUTION


# %%
check("at_best")

# %% [markdown]
# Guess for each of these, on an H100, before you run the cell: what is it bound by? A norm of 8192 tokens; the same
# norm of 8 tokens, as in generating text; a square matrix product; the same matrix times one vector; times 128 vectors.
# A norm computes 4 FLOP a number: square, add, times 1/root, times γ. (NVIDIA's data sheets, SXM, bf16 without
# sparsity: 989 TFLOP/s for both; 3.35 TB/s for the H100, 4.8 TB/s for the H200. For a launch take 5 µs.)

# %% tags=["hide-output"]
# %%needs at_best
from minimegatron.viz.roofline import roofline

H100, H200 = (989e12, 3.35e12), (989e12, 4.8e12)
h = 4096
programs = {
    "norm, 8192 tokens": (4 * 8192 * h, 2 * 8192 * h * 2),
    "norm, 8 tokens": (4 * 8 * h, 2 * 8 * h * 2),
    "matrix x matrix": (2 * h**3, 3 * h * h * 2),
    "matrix x vector": (2 * h * h, (h * h + 2 * h) * 2),
    "matrix x 128 vectors": (2 * h * h * 128, (h * h + 2 * h * 128) * 2),
}
points = {}
for name, (flops, nbytes) in programs.items():
    best = at_best(flops, nbytes, *H100, 5e-6)
    at, us = best["intensity"], best["seconds"] * 1e6
    if name != "norm, 8 tokens":  # it stands where the other norm does: a launch has no place in this picture
        points[name.replace(", 8192 tokens", ", fused")] = at, None
    print(f"{name:21} {at:7.1f} FLOP/byte  {us:6.1f} us at best  bound: {best['bound']}")
display(roofline({"H100": H100, "H200": H200}, points, "At best, in bf16"))

# %% [markdown]
# Only the product of two matrices reaches the flat part. Everything left of the ridge takes as long as its bytes: 128
# vectors take 6 % longer than one. (The norm and the product with one vector stand in one place: 1 FLOP a byte.) While
# the norm's bytes move, the tensor cores could do 295 times the norm's operations: it uses 0.34 % of their arithmetic.
# (A norm cannot use tensor cores anyway. Of the ordinary float32 arithmetic, 67 TFLOP/s, it uses 5 %.)
#
# The norm of 8192 tokens has 40 µs of work: its launch hides behind the kernel before. The norm of 8 tokens has 0.04 µs
# of work and takes 5: there a kernel costs its launch, whatever you do inside of it. So three things help: fewer passes
# over memory (a fused kernel, flash attention), fewer bytes a number (FP8), and fewer launches (fused kernels again, or
# a *CUDA graph*, which launches a recorded series at once).
#
# ## 3 · Implement
#
# ### Grid, block, warp, thread
#
# A function that runs on a GPU is a **kernel**. You *launch* it, and many threads run the same text. You write six
# kernels: an addition, the norm four times, each time with less to wait for, and its backward pass.

# %%
from course.figures.kernels import hierarchy

hierarchy(blocks=4, threads=64, sms=2)

# %% [markdown]
# * A **thread** runs the kernel's text once. Its variables are in registers, which no other thread sees.
# * 32 threads are a **warp**. As a rule they execute the same instruction at the same time, each on its own numbers.
#   (CUDA does not promise it; "Warps add up by themselves", below, says more.)
# * A **block** is up to 1024 threads. It runs on one SM (streaming multiprocessor) from its beginning to its end, and
#   its threads share a piece of that SM's memory, which is on the chip. Arrays like x lie in the *global memory*, the
#   large one outside the chip, which all threads see.
# * The **grid** is all blocks of a launch. They run in any order, several at a time, and do not wait for each other.
#
# In the text, `threadIdx.x` is the thread's number in its block, `blockIdx.x` the block's number in the grid, and
# `blockDim.x` how many threads a block has.
#
# The text in `Kernel(r"""...""")` is CUDA C++, as it would stand in a `.cu` file: functions, templates, lambdas,
# structs, `float4`, `__nv_bfloat16` and `half`, shuffles, atomics, `printf`. It has device code alone: Python launches
# the kernel, and tensors are its memory. Not in it: PTX (`asm`), cooperative groups, tensor cores, asynchronous copies,
# launches from a kernel. With a GPU, nvcc compiles the text as it is. Here g++ does, and an emulator runs the threads
# one after another. It counts every access, and stops at one that is out of bounds. It also stops at a *race*: one
# thread writes a word of shared memory that another one uses, with no barrier between. A variable that was given no
# value holds NaN (an integer: a large number), where a GPU would have what lay in the register before. Two things it
# does not see: a struct that goes from memory straight into a function, as in `f(row[i])` with a `float4` (load it into
# a variable first); and of an array of bf16 in a thread's own variables the one number behind its end.
#
# The smallest launch: one block of eight threads, a number for each.

# %%
from course.lab07.cuda import Kernel, KernelError
from minimegatron.kernels.build import compiler

double = Kernel(r"""
__global__ void twice(const float* x, float* y) {
  int i = threadIdx.x;
  y[i] = 2 * x[i];
}
""")
if compiler("emulated") is None:
    print("no C++ compiler here: install g++; the next four exercises need it")
else:
    eight, result = torch.arange(8.0), torch.empty(8)
    double(eight, result, grid=1, block=8)
    print(result.tolist())
    try:
        double(eight, result, grid=1, block=9)  # a thread too many
    except KernelError as error:
        print(error)

# %% [markdown]
# A ninth thread reads behind the end of x. The emulator says which thread, and on which line. A GPU often says
# nothing, and the thread reads, or overwrites, whatever lies there.
#
# ### A first kernel: a thread a number
#
# More numbers than a block has threads? Take more blocks. Thread `threadIdx.x` of block `blockIdx.x` takes number
# `blockIdx.x * blockDim.x + threadIdx.x`, as under the picture of the grid, above. 10 numbers in blocks of 4 threads
# need 3 blocks, that is 12 threads, and the last two of them have no number: they must do nothing.
#
# **Exercise.** `y = x + r`, the addition that ends each half of a transformer layer: one thread for each number, in
# blocks of 256, and no block more than needed. Write the kernel, and how many blocks there are. (Delete the lines
# `not_implemented` and `raise NotImplementedError`.)

# %%
# %%exercise add
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void add(const float* x, const float* r, float* y, int n) {
  // ### BEGIN SOLUTION
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + r[i];
  // ### END SOLUTION
}
""")


def add(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """x and r, float32 of one shape -> x + r."""
    y, n = torch.empty_like(x), x.numel()
    ### BEGIN SOLUTION
    blocks = (n + 255) // 256
    ### END SOLUTION
    kernel(x, r, y, n, grid=blocks, block=256)
    return y


# %%
check("add")

# %% [markdown]
# ### The simplest norm: a thread a row
#
# Now the norm. A row's sum needs all of its numbers, so the simplest kernel gives a whole row to one thread. Here it
# is:

# %%
from course.lab07 import by_rows

print(by_rows.kernel.source)

# %% [markdown]
# It is right. But memory is fetched in **sectors** of 32 bytes, eight floats. The 32 threads of a warp execute `x[...]`
# at the same time, each in a row of its own. Of the bytes that are fetched for one such load, what share is asked for?

# %%
guess("share", None, "How many percent of the fetched bytes does a warp ask for?")

# %%
x, gamma = torch.randn(64, 256), torch.randn(256)
if compiler("emulated"):
    by_rows.norm(x, gamma, 1e-5)
    guessed("share", 100 * by_rows.kernel.counts["x"]["share"], "% of the fetched bytes")

# %% [markdown]
# Each thread wants 4 bytes of a sector of its own. (A cache may keep the other 28 until the loop reaches them. With
# thousands of rows under way it is too small.) In the upper picture, eight threads of this kernel and what is fetched
# for them; in the lower one, how it should be.

# %%
from course.figures.kernels import access_map

shape = (8, 32)
access_map(shape, {
    "a thread a row": [thread * 32 for thread in range(8)],
    "neighbours read neighbours": list(range(8)),
})  # fmt: skip

# %% [markdown]
# ### A block a row
#
# Let a whole block work on one row. Thread t reads columns t, t + blockDim.x, ...: neighbours read neighbours. Each
# thread then has a part of the sum, and the parts must come together. For that a block has **shared memory**, on the
# chip: `__shared__ float parts[256];` is one array for all threads of the block.
#
# They add in a tree. Here are eight threads; with 256 the lower 128 add what the upper 128 hold, then 64, 32, ..., 1.

# %%
from course.figures.kernels import reduction_tree

reduction_tree([3, 1, 4, 1, 5, 9, 2, 6])

# %% [markdown]
# Each dashed line is a **barrier**, `__syncthreads()`: a thread waits there until all threads of its block have come.
# Without it a thread may read a part that another one has not yet written, a *race*: right in one order of the
# threads, wrong in another.
#
# **Exercise.** One block of 256 threads for each row. Every thread of a block must meet the same `__syncthreads()`, so
# none stands in an `if` that only some of them enter. Add up in a tree: one thread that adds 256 parts, while 255
# wait, is refused, because the wait is what a tree saves. The check runs the threads in several orders.

# %%
# %%exercise norm_block
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[256];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  // ### BEGIN SOLUTION
  float sum = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) {
    float v = row[i];
    sum += v * v;
  }
  parts[threadIdx.x] = sum;
  for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }
  __syncthreads();
  float rstd = rsqrtf(parts[0] / cols + eps);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
  // ### END SOLUTION
}
""")


def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, cols], gamma [cols], both float32 -> y [rows, cols]."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %%
check("norm_block")

# %% [markdown]
# ### Warps add up by themselves
#
# Nine barriers a row are costly: at each one, 256 threads wait for the slowest.
#
# Inside of a warp a sum needs neither shared memory nor a barrier. `__shfl_xor_sync(0xffffffff, v, o)` hands lane i
# (thread i of the warp) the `v` of lane i^o, where ^ flips those bits of i that are 1 in o: 5^4 is 1, 5^1 is 4. The
# mask `0xffffffff` names all 32 lanes, and those that it names wait for each other in the shuffle, so all of them must
# come. With o = 16, 8, 4, 2, 1 and a sum at each step, all 32 have the total. Here are eight lanes:

# %%
from course.figures.kernels import butterfly

butterfly([3, 1, 4, 1, 5, 9, 2, 6])

# %% [markdown]
# So a warp has its sum without a barrier. Eight warps have eight sums. How does *every* thread of the block get the
# total, with one barrier? (It is the shuffle that waits. Threads of a warp that use *shared memory* may run apart, on
# all GPUs since Volta, 2017: a tree without barriers for s below 32, as in old code, is a race, and needs
# `__syncwarp()`.)
#
# **Exercise.** The norm with shuffles: at most two barriers; one is enough. (Functions that a kernel calls are marked
# `__device__`.)

# %%
# %%exercise norm_warp
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float warp_sum(float v) {
  // ### BEGIN SOLUTION
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  return v;
  // ### END SOLUTION
}

__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[32];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float sum = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += row[i] * row[i];
  // ### BEGIN SOLUTION
  sum = warp_sum(sum);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < warps ? parts[lane] : 0.0f);
  // ### END SOLUTION
  float rstd = rsqrtf(sum / cols + eps);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
}
""")


def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, cols], gamma [cols], both float32 -> y [rows, cols]."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %%
check("norm_warp")

# %% [markdown]
# ### The row stays in registers
#
# A fused norm could do with two passes over memory. Yours make three: they read x to add up, and again to write.
# Between the two the row could stay where it is, in registers: an SM has 65,536 of them, more room than its shared
# memory.
#
# A thread's array is in registers only if the compiler knows every index: `float kept[PER];` with a `constexpr` PER, in
# loops from 0 to PER that are unrolled (`#pragma unroll`). An index that is known only when the kernel runs sends the
# array to *local memory*, which is global memory: slow, and no error says so. (The check looks for such an index.) So
# the room is fixed when you compile: 256 threads with 16 numbers each hold 4096 columns. A row may have fewer columns,
# and it may have more.
#
# **Exercise.** Read x once. A row of more than 4096 columns is either refused, by a `ValueError` before the launch, or
# computed right by another way, which may read x twice. What must not happen is a wrong norm. `block_sum` is given: the
# sum over all threads of the block, in each of them.

# %%
# %%exercise norm_registers
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

constexpr int PER = 16;  // numbers of a row that one thread keeps

__global__ void rms_norm(const float* x, const float* gamma, float* y, int cols, float eps) {
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  // ### BEGIN SOLUTION
  float kept[PER], sum = 0;
#pragma unroll
  for (int k = 0; k < PER; ++k) {
    int i = threadIdx.x + k * blockDim.x;
    kept[k] = i < cols ? row[i] : 0.0f;
    sum += kept[k] * kept[k];
  }
  float rstd = rsqrtf(block_sum(sum) / cols + eps);
#pragma unroll
  for (int k = 0; k < PER; ++k) {
    int i = threadIdx.x + k * blockDim.x;
    if (i < cols) out[i] = kept[k] * rstd * gamma[i];
  }
  // ### END SOLUTION
}
""")


def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, cols], gamma [cols], both float32 -> y [rows, cols]."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    ### BEGIN SOLUTION
    if cols > 16 * 256:
        raise ValueError(f"a row of {cols} numbers does not fit into the registers of a block: at most 4096")
    ### END SOLUTION
    kernel(x, gamma, y, cols, eps, grid=rows, block=256)
    return y


# %%
check("norm_registers")

# %% [markdown]
# ### Half the bytes: bf16, 16 at a time
#
# A model's activations are bf16: 2 bytes, 8 bits of precision. That halves the bytes, and brings two new questions.
#
# *How wide is a load?* One instruction loads up to 16 bytes a thread. A number at a time is now 2 bytes, and the
# instructions become what the norm waits for. So load eight at once, as a `Pack`, from an address that is a multiple of
# 16 bytes: `reinterpret_cast<const Pack*>(x)` sees the array as packs.
#
# *In which precision does one compute?* Add up 1 + 1 + 1 + ... in bf16, with its 8 bits. Where does the sum stop
# growing?

# %%
guess("stops", None, "Where does the sum of ones in bf16 stop?")

# %%
total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(4096):
    total += 1
guessed("stops", int(total), "for 4096 ones")

# %% [markdown]
# So statistics are float32, and so is everything between: a number is rounded to bf16 once, when it is stored.
# `__bfloat162float(b)` and `__float2bfloat16(f)` convert.
#
# **Exercise.** The norm in bf16, with 16 bytes a load of x and of γ, and a store. The check compares with float64,
# rounded once. x may be read twice.

# %%
# %%exercise norm_bf16
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

struct alignas(16) Pack { __nv_bfloat16 v[8]; };

__global__ void rms_norm(const __nv_bfloat16* x, const __nv_bfloat16* gamma, __nv_bfloat16* y, int cols, float eps) {
  const Pack* row = reinterpret_cast<const Pack*>(x + (long long)blockIdx.x * cols);
  const Pack* weight = reinterpret_cast<const Pack*>(gamma);
  Pack* out = reinterpret_cast<Pack*>(y + (long long)blockIdx.x * cols);
  // ### BEGIN SOLUTION
  float sum = 0;
  for (int i = threadIdx.x; i < cols / 8; i += blockDim.x) {
    Pack p = row[i];
    for (int j = 0; j < 8; ++j) {
      float v = __bfloat162float(p.v[j]);
      sum += v * v;
    }
  }
  float rstd = rsqrtf(block_sum(sum) / cols + eps);
  for (int i = threadIdx.x; i < cols / 8; i += blockDim.x) {
    Pack p = row[i], g = weight[i];
    for (int j = 0; j < 8; ++j) p.v[j] = __float2bfloat16(__bfloat162float(p.v[j]) * rstd * __bfloat162float(g.v[j]));
    out[i] = p;
  }
  // ### END SOLUTION
}
""")


def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, cols], gamma [cols], both bf16, cols a multiple of 8 -> y [rows, cols], bf16."""
    rows, cols = x.shape
    if cols % 8:
        raise ValueError(f"a row of {cols} bf16 does not begin at a multiple of 16 bytes")
    y = torch.empty_like(x)
    kernel(x, gamma, y, cols, eps, grid=rows, block=256)
    return y


# %%
check("norm_bf16")

# %% [markdown]
# All norms, as the emulator counts them. The first line is the kernel that was given. What do you expect in the last
# two lines? (A pass is as many bytes as x has; it reads and writes. The package's own kernel, `norm.cu`, does both: 16
# bytes a load, and the row in registers.)

# %%
# %%ranks 1 --needs norm_block,norm_warp,norm_registers,norm_bf16 --name ladder
import importlib

import torch
import torch.nn.functional as F

from course.lab07 import by_rows

x, gamma = torch.randn(32, 1024), torch.randn(1024)
print("kernel          right   passes over memory   share of fetched bytes used   bytes a load   barriers a thread")
for name in ("by_rows", "norm_block", "norm_warp", "norm_registers", "norm_bf16"):
    module = by_rows if name == "by_rows" else importlib.import_module(f"exercises.{name}")
    given = (x.bfloat16(), gamma.bfloat16()) if name == "norm_bf16" else (x, gamma)
    y = module.norm(*given, 1e-5)
    right = torch.allclose(y.float(), F.rms_norm(x, (1024,), gamma, 1e-5), atol=1e-5, rtol=4 * torch.finfo(y.dtype).eps)
    counts = module.kernel.counts
    passes = (counts["x"]["read"] + counts["y"]["written"]) / given[0].nbytes
    width = counts["x"]["read"] // counts["x"]["loads"]
    share, barriers = counts["x"]["share"], counts["barriers"]
    print(f"{name:15} {right!s:5} {passes:20.0f} {share:29.1%} {width:14} {barriers:19.0f}")

# %% [markdown]
# ### Backward: a sum over rows
#
# With g = dy·γ and n = x/root, the normed row, the gradients are
#
# $$dx = \frac{1}{\text{root}}\,(g - n \cdot \text{mean}(g\,n)) \qquad d\gamma_i = \sum_{\text{rows}} dy_i\, n_i$$
#
# dx stays inside of a row: two sums over the row, and the same kernel as before. dγ goes *across* rows, which lie in
# different blocks, and blocks do not wait for each other. Three ways:
#
# 1. Each block adds its row to dγ in memory, with `atomicAdd`. 8192 blocks queue for the same words, and floats are
#    added in the order in which the blocks come. (0.1 + 0.2) + 0.3 is not 0.1 + (0.2 + 0.3): other last bits in every
#    run, and no run can be repeated.
# 2. Write dy·n whole, [rows, cols], and add it up in a second kernel. Repeatable, and two more passes over memory.
# 3. A few blocks for all rows, as many as the GPU runs at once. Block b takes rows b, b + gridDim.x, ... What do its
#    threads have in their hands after the last of them?
#
# **Exercise.** The third way. The first kernel computes dx already; let it write a row of `partial` [blocks, cols] for
# each block. `column_sums` adds these few rows up, and is yours. No atomics: the same bits each time. By hand, with
# γ = 1: three rows (2, 2), (3, 3), (1, -1) are normed (1, 1), (1, 1), (1, -1). With dy = (1, 0), (0, 2), (3, 1), dγ is
# (1 + 0 + 3, 0 + 2 - 1) = (4, 1).

# %%
# %%exercise norm_backward
import torch

from course.lab07.cuda import Kernel

rows_kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  __syncthreads();  // all have read the sum before this one
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

constexpr int PER = 4;

__global__ void backward(const float* dy, const float* x, const float* gamma, float* dx, float* partial, int rows,
                         int cols, float eps) {
  // ### BEGIN SOLUTION
  float of_gamma[PER] = {};
  // ### END SOLUTION
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = (long long)row * cols;
    float kept_x[PER], kept_dy[PER], squares = 0, products = 0;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      int i = threadIdx.x + k * blockDim.x;
      kept_x[k] = i < cols ? x[at + i] : 0.0f;
      kept_dy[k] = i < cols ? dy[at + i] : 0.0f;
      squares += kept_x[k] * kept_x[k];
      products += i < cols ? kept_dy[k] * gamma[i] * kept_x[k] : 0.0f;
    }
    float rstd = rsqrtf(block_sum(squares) / cols + eps);
    float mean = block_sum(products) * rstd / cols;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      int i = threadIdx.x + k * blockDim.x;
      if (i < cols) dx[at + i] = rstd * (kept_dy[k] * gamma[i] - kept_x[k] * rstd * mean);
      // ### BEGIN SOLUTION
      of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;
      // ### END SOLUTION
    }
  }
  // ### BEGIN SOLUTION
#pragma unroll
  for (int k = 0; k < PER; ++k) {
    int i = threadIdx.x + k * blockDim.x;
    if (i < cols) partial[(long long)blockIdx.x * cols + i] = of_gamma[k];
  }
  // ### END SOLUTION
}
""")

columns_kernel = Kernel(r"""
__global__ void column_sums(const float* partial, float* dgamma, int parts, int cols) {
  // ### BEGIN SOLUTION
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= cols) return;
  float sum = 0;
  for (int p = 0; p < parts; ++p) sum += partial[(long long)p * cols + i];
  dgamma[i] = sum;
  // ### END SOLUTION
}
""")


def norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, eps: float, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy, x [rows, cols], gamma [cols], float32, cols at most 1024 -> dx [rows, cols], dgamma [cols]."""
    rows, cols = x.shape
    dx, dgamma, partial = torch.empty_like(x), torch.empty_like(gamma), torch.empty(blocks, cols, device=x.device)
    rows_kernel(dy, x, gamma, dx, partial, rows, cols, eps, grid=blocks, block=256)
    ### BEGIN SOLUTION
    columns_kernel(partial, dgamma, blocks, cols, grid=(cols + 255) // 256, block=256)
    ### END SOLUTION
    return dx, dgamma


# %%
check("norm_backward")

# %% [markdown]
# ### A model trains with your kernels
#
# The proof that a kernel is right is a model that trains with it as with torch's own. In PyTorch a kernel becomes a
# part of a model as a `torch.autograd.Function`: `forward` launches one, `backward` the other. The cell trains a small
# network twice from the same weights: with `F.rms_norm`, and with your two kernels. What do you expect of the losses:
# equal to the last bit, to 5 digits, to 1 %?

# %% jupyter={"source_hidden": true}
# %%ranks 1 --needs norm_registers,norm_backward --name trains
import torch
import torch.nn.functional as F
from exercises.norm_backward import norm_backward
from exercises.norm_registers import norm


class Norm(torch.autograd.Function):
    """RMSNorm by the lab's kernels."""

    @staticmethod
    def forward(ctx, x, gamma, eps):
        ctx.save_for_backward(x, gamma)
        ctx.eps = eps
        return norm(x, gamma, eps)

    @staticmethod
    def backward(ctx, dy):
        x, gamma = ctx.saved_tensors
        dx, dgamma = norm_backward(dy.contiguous(), x, gamma, ctx.eps, 4)
        return dx, dgamma, None


ways = {"torch's": lambda x, g: F.rms_norm(x, (32,), g, 1e-5), "yours": lambda x, g: Norm.apply(x, g, 1e-5)}
text = torch.frombuffer(bytearray(b"what is read once need not be read twice; " * 8), dtype=torch.uint8).long()
losses = {}
for name, rms_norm in ways.items():
    g = torch.Generator().manual_seed(7)
    embed, head = torch.randn(128, 32, generator=g), torch.randn(128, 32, generator=g) / 6
    up, down = torch.randn(64, 32, generator=g) / 6, torch.randn(32, 64, generator=g) / 8
    gammas = [torch.ones(32), torch.ones(32)]
    weights = [w.requires_grad_() for w in (embed, head, up, down, *gammas)]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    losses[name] = []
    for step in range(12):
        tokens = text[step : step + 41]
        h = embed[tokens[:-1]]
        h = h + F.relu(rms_norm(h, gammas[0]) @ up.T) @ down.T
        loss = F.cross_entropy(rms_norm(h, gammas[1]) @ head.T, tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[name].append(loss.item())
mine, other = losses["yours"], losses["torch's"]
print(f"the loss fell by more than a third: {mine[-1] < mine[0] * 2 / 3}")
print(f"equal to 4 digits in all 12 steps: {all(abs(a / b - 1) < 1e-4 for a, b in zip(mine, other))}")

# %% [markdown]
# Not to the last bit: your kernels add in another order than torch does. But run the cell twice, and your own losses
# are the same to the last bit; that is what the third way bought.
#
# *The end of part A, and a good place to stop.*
#
# ### Flash attention: what not to move
#
# Attention as three operations: S = Q·Kᵀ, P = softmax(S), out = P·V. S and P have s x s numbers for each head. The
# forward pass writes them only to read them again in the next operation.
#
# Flash attention (Dao et al., 2022) never writes them. In the order of FlashAttention-2 (Dao, 2023), a kernel keeps a
# block of `rows` queries on the chip, loads one block of `cols` keys and values after another, and builds the softmax
# block by block. (The first paper had the loops the other way round: it kept keys and values, and loaded the queries
# again and again.) Only q, k, v, out and one number a query, lse, are in the global memory. The price: every block of
# queries loads K and V again.
#
# The mask is causal, so a block of queries needs no keys after its last query. Twelve tokens, in blocks of 4 queries
# and 3 keys:

# %%
from course.figures.kernels import score_tiles

score_tiles(12, 4, 3)

# %% [markdown]
# **Exercise.** Bytes that one head moves, forward. *Standard*: three kernels; each reads its inputs and writes its
# result, all of S and P, although the mask is causal. *Flash*: q is read once, out and lse are written once, and each
# block of queries loads, whole, the blocks of keys that begin no later than its last query, and their values. Every
# number, those of lse too, has `element_size` bytes. `rows` and `cols` divide s.

# %%
# %%exercise flash_bytes
def flash_bytes(s: int, d: int, rows: int, cols: int, element_size: int) -> dict[str, int]:
    """{"standard": ..., "flash": ...} of one head: q, k, v and out are [s, d], lse is [s]."""
    ### BEGIN SOLUTION
    keys = 0  # loaded by all blocks of queries together
    for last in range(rows - 1, s, rows):
        keys += (last // cols + 1) * cols
    return {"standard": (4 * s * s + 4 * s * d) * element_size, "flash": (2 * s * d + s + 2 * keys * d) * element_size}
    ### END SOLUTION


# %%
check("flash_bytes")

# %%
# %%needs flash_bytes
for s in (1024, 8192, 65536):
    moved = {rows: flash_bytes(s, 128, rows, 64, 2) for rows in (64, 128, 256)}
    times = "   ".join(f"rows {rows}: {m['standard'] / m['flash']:4.1f} x less" for rows, m in moved.items())
    print(f"{s:6} tokens   {moved[64]['standard'] / 2**20:8.0f} MiB   {times}")

# %% [markdown]
# What counts is the block of *queries*: twice as many rows, half as often K and V. `cols` changes next to nothing. So
# a kernel takes as many rows as the chip has room for, and that is why flash kernels are written around registers and
# shared memory. (Here every load counts. On a GPU blocks of queries that run at the same time load the same keys, and
# many of these loads are served by the L2, the cache that all SMs share.)
#
# How can a softmax be built block by block, without the largest score known? Keep three numbers a query: the largest
# score so far m, the sum l of e^(score - m), and o, the values weighted with these. One query, scores 1, 2, then 4,
# with the values 10, 20, then 30, in two blocks:

# %%
from course.figures.kernels import online_softmax

online_softmax([[1, 2], [4]], [[10, 20], [30]])

# %% [markdown]
# The arrow between the blocks is the idea: l and o were added up under the old maximum, 2. Under the new one, 4, they
# are too large by e². What is added after that is right already.
#
# **Exercise.** The kernel, on tiles. `memory.load("k", a, b)` brings rows a to b-1 to the chip and counts them;
# `memory.store("out", a, b, value)` writes. Before the first block of keys m is -∞, l and o are 0. The scores are S =
# q·kᵀ/√d, -∞ where the key comes after the query. Work out from the picture what a block of keys does to m, l and o of
# a whole block of queries, each with its own m.
#
# At the end out = o/l and lse = m + log l. The check compares the counts with your prediction, which has to be met
# exactly. All that you hold at one time (tiles, scores, m, l, o) must fit into the room of the whole K, s·d numbers.

# %%
# %%exercise flash_tiles
import torch


def flash_tiles(memory, s: int, d: int, rows: int, cols: int) -> None:
    """Causal attention of q, k, v [s, d] in memory -> out [s, d] and lse [s] in memory."""
    ### BEGIN SOLUTION
    for first in range(0, s, rows):
        q, at = memory.load("q", first, first + rows), torch.arange(first, first + rows)[:, None]
        top, total, o = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for start in range(0, first + rows, cols):
            k, v = memory.load("k", start, start + cols), memory.load("v", start, start + cols)
            scores = (q @ k.T / d**0.5).masked_fill(torch.arange(start, start + cols) > at, -torch.inf)
            higher = torch.maximum(top, scores.amax(1, keepdim=True))
            p, shrink = torch.exp(scores - higher), torch.exp(top - higher)
            total, o, top = total * shrink + p.sum(1, keepdim=True), o * shrink + p @ v, higher
        memory.store("out", first, first + rows, o / total)
        memory.store("lse", first, first + rows, (top + total.log()).squeeze(1))
    ### END SOLUTION


# %%
check("flash_tiles")

# %%
# %%needs flash_bytes flash_tiles
import torch
import torch.nn.functional as F

from labkit.hbm import Memory
from minimegatron.viz.bars import byte_bars

s, d = 512, 32
q, k, v = torch.randn(3, s, d, generator=torch.Generator().manual_seed(0)).unbind()
want = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
memory = Memory(q=q, k=k, v=v, scores=torch.zeros(s, s), weights=torch.zeros(s, s), out=torch.zeros(s, d))
memory.store("scores", 0, s, memory.load("q", 0, s) @ memory.load("k", 0, s).T / d**0.5)
hidden = torch.ones(s, s).triu(1).bool()
memory.store("weights", 0, s, memory.load("scores", 0, s).masked_fill(hidden, -torch.inf).softmax(1))
memory.store("out", 0, s, memory.load("weights", 0, s) @ memory.load("v", 0, s))
predicted, measured = {"three kernels": flash_bytes(s, d, 64, 32, 4)["standard"]}, {"three kernels": 4 * memory.moved}
for rows in (32, 64, 128):
    memory = Memory(q=q, k=k, v=v, out=torch.zeros(s, d), lse=torch.zeros(s))
    flash_tiles(memory, s, d, rows, 32)
    out = memory.load("out", 0, s)
    predicted[f"flash, {rows} rows"] = flash_bytes(s, d, rows, 32, 4)["flash"]
    measured[f"flash, {rows} rows"] = 4 * (memory.moved - s * d)
    print(f"{rows:3} rows: as torch's attention: {torch.allclose(out, want, atol=1e-5)}")
display(byte_bars(predicted, measured, title="One head, 512 tokens", what="moved"))

# %% [markdown]
# The backward pass needs P again. It is not stored, so it is computed again from q, k and lse: P = exp(S - lse). You
# built that in lab 04. Forward and backward together are six matrix products, and S once more makes seven: a sixth
# more arithmetic, for s x s numbers that are neither written nor read.
#
# *The end of part B, and a good place to stop.*
#
# ### FP8: eight bits
#
# Half the bytes of bf16, and on an H100 twice the FLOP/s. A number in **E4M3** has a sign, 4 bits of exponent and 3
# mantissa bits: 1.mmm · 2^e, with e from -6 to 8, at most 448. Below 2^-6 the steps stay as they are, 2^-9, down to 0.
# **E5M2** has one exponent bit more and one mantissa bit fewer: e from -14, at most 57344. Activations and weights get
# E4M3; gradients, whose sizes differ more, get E5M2. All their numbers up to 4, and those close to 0:

# %%
from course.figures.kernels import number_lines

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # mantissa bits, lowest exponent, largest number
number_lines({"E4M3": E4M3, "E5M2": E5M2}, [(0, 4), (0, 2**-5)], "The numbers of both formats: a mark for each")

# %% [markdown]
# Between two powers of two there are eight steps in E4M3, four in E5M2. By hand, 0.3 in E4M3: 0.3 = 1.2 · 2^-2, the
# steps there are 2^-2 / 8 = 2^-5, and 0.3 is 9.6 of them. Rounded, 10 steps: 0.3125.
#
# What is 17 in E4M3? And 1000? (The numbers around 17 are 16, 18, 20.)
#
# **Exercise.** Round to such a format, with `mantissa` mantissa bits, lowest exponent `lowest` and largest number
# `top`. The result stays float32; only its values are those of the format. Beyond ±top, infinities too: ±top. NaN
# stays NaN. Nearest number; half-way, the one whose last mantissa bit is 0 (even). Other formats than these two are
# asked too, so do not ask torch for its float8. `x` belongs to the caller: leave it as it is.

# %%
# %%exercise to_fp8
import torch


def to_fp8(x: torch.Tensor, mantissa: int, lowest: int, top: float) -> torch.Tensor:
    """Each number of x, rounded; float32."""
    ### BEGIN SOLUTION
    x = x.float().clamp(-top, top)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=lowest)
    step = torch.exp2((exponent - mantissa).float())
    return torch.round(x / step) * step
    ### END SOLUTION


# %%
check("to_fp8")

# %%
# %%needs to_fp8
import matplotlib.pyplot as plt
import torch

from minimegatron.viz.picture import MEASURED_LINE, styled

print("17, 1000 and 0.001 in E4M3:", to_fp8(torch.tensor([17.0, 1000.0, 0.001]), *E4M3).tolist())
bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()  # every bf16 there is
for name, (format, dtype) in {"E4M3": (E4M3, torch.float8_e4m3fn), "E5M2": (E5M2, torch.float8_e5m2)}.items():
    cast, mine = bits.clamp(-format[2], format[2]).to(dtype).float(), to_fp8(bits, *format)
    other = int((mine.nan_to_num(7.0) != cast.nan_to_num(7.0)).sum())
    print(f"{name}: other than torch's cast, of all 65536 numbers of bf16: {other}")

with styled():
    fig, axes = plt.subplots(1, 3, figsize=(9, 2.6), width_ratios=(3, 3, 2))
    sizes, octave = torch.logspace(-6, 6, 3000), torch.linspace(1, 2, 2001)
    for ax, (name, format) in zip(axes, {"E4M3": E4M3, "E5M2": E5M2}.items()):
        ax.plot(sizes, (to_fp8(sizes, *format) - sizes).abs() / sizes, **{**MEASURED_LINE, "linewidth": 0.7})
        ax.set(xscale="log", yscale="log", ylim=(0.005, 1.5), xlabel="number", title=name)
    axes[2].plot(octave, (to_fp8(octave, *E4M3) - octave).abs() / octave, **{**MEASURED_LINE, "linewidth": 1})
    axes[2].axhline(1 / 17, color="0.5", linestyle="--")
    axes[2].text(2, 1 / 17, "1/17", va="bottom", ha="right")
    axes[2].set(xlabel="number", title="E4M3, 1 to 2", ylim=(0, 0.07), yticks=(0, 0.02, 0.04, 0.06))
    axes[0].set(ylabel="relative error")
    plt.show()

# %% [markdown]
# In the middle the error is at most 1/17 (E4M3) or 1/9 (E5M2) of the number. The picture at the right has one octave
# with its eight steps: 1.0625, half-way from 1 to the next number of E4M3, is off by 0.0625. At the left end of the
# others small numbers vanish: the error is 1. At the right end large ones are cut off. A tensor must lie in the valley
# between: so multiply it by a **scale** first, and divide the result by it.
#
# ### Which scale?
#
# *Current* scaling: look at the tensor, let amax be its largest magnitude, and use top/amax. One outlier then decides
# for all. *Block* scaling: a scale for every tile. An outlier spoils its own tile only. DeepSeek-V3 takes tiles of 1 x
# 128 numbers of an activation and 128 x 128 of a weight. Blackwell's tensor cores take **MX**
# tiles (OCP Microscaling 1.0, 2023): 1 x 32 numbers, with a scale that is one byte, **E8M0**: eight bits of exponent,
# no sign, no mantissa. The byte e means X = 2^(e - 127), and 255 means NaN. A tile's numbers are *divided* by X. To
# divide by a power of two is exact.
#
# Which X? The smallest with amax ≤ top · X, so that nothing is cut off. (That is NVIDIA's rule, Mishra et al. 2025. The
# standard's own example takes 2^(⌊log2 amax⌋ - 8) for E4M3, and cuts off what lies beyond 1.75 times a power of two.)
#
# By hand, top = 448 and a tile (1, -2): 448 · 2^-8 = 1.75 is too small for 2, 448 · 2^-7 = 3.5 is enough. So X = 2^-7,
# and the byte is 127 - 7 = 120.
#
# **Exercise.** The bytes of tiles of any shape; the last ones of a row or column may be cut short, and a tile may be
# the whole tensor. E8M0 has no X below 2^-127, which is the byte 0: a tile of zeros gets it, too. A tile that holds ∞
# or NaN gets 255. `amax ≤ top · X` holds exactly, for every amax that x can have.

# %%
# %%exercise tile_scales
import torch


def tile_scales(x: torch.Tensor, tile: tuple[int, int], top: float) -> torch.Tensor:
    """x [m, n] -> the scale of each tile in E8M0, uint8 [tiles down, tiles across]."""
    ### BEGIN SOLUTION
    rows = [torch.stack([piece.abs().max() for piece in row.split(tile[1], 1)]) for row in x.split(tile[0])]
    amax = torch.stack(rows).double()
    code = torch.ceil(torch.log2(amax / top)).clamp(min=-127) + 127
    return torch.where(amax.isfinite(), code, 255.0).to(torch.uint8)
    ### END SOLUTION


# %%
check("tile_scales")

# %% [markdown]
# One outlier in a small tensor, cast with one scale for all and with a scale for each tile. Which numbers become 0?

# %%
# %%needs to_fp8 tile_scales
import torch

from course.figures.kernels import scaled_tiles

small = torch.tensor([[0.5, -0.75, 0.001, 2.0, -0.0003, 1e5], [0.25, 0.1, -0.3, 0.02, 0.6, -0.9]])
ways = []
for name, tile in (("one scale for all", (2, 6)), ("tiles of 1 x 3", (1, 3))):
    scales = torch.exp2(tile_scales(small, tile, 448.0).float() - 127)
    spread = scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    ways.append((name, tile, scales.tolist(), (to_fp8(small / spread, *E4M3) * spread).tolist()))
scaled_tiles(small.tolist(), ways, "Cast to E4M3, and back")

# %% [markdown]
# ### Delayed scaling
#
# Current scaling reads the tensor once for amax and again to cast it: memory, again. *Delayed* scaling casts at once,
# with a scale from the *past*, and notes the new amax on the way:
#
# * `note(x)`: keep the largest magnitude of this step; a step may note several times, once a microbatch.
# * end of the step: the amax of this step joins the history of the last H steps; scale = top / largest of the history.
# * Not finite, ∞ or NaN? The step overflowed: leave the scale, and put 0 into the history. (This rule is the lab's. In
#   Transformer Engine ∞ stays in the history, so the scale is left until it has gone out, H steps later.)
# * Is the largest of the history 0? Leave the scale.
#
# By hand, H = 2 and top = 448; the third step overflows:
#
# | step | noted in this step | history afterwards | scale afterwards |
# |---|---|---|---|
# | 1 | 2, then -4 | 4 | 448/4 = 112 |
# | 2 | 1, then 1 | 4, 1 | 112 |
# | 3 | ∞, then 1 | 1, 0 | 112, left |
# | 4 | 2, then 1 | 0, 2 | 448/2 = 224 |
#
# With tensor parallelism a rank sees a part of the tensor. All must scale alike, so each amax is the largest **over
# all ranks of tp**, and a step that overflowed on one of them has overflowed on all. Dozens of tensors, one number
# each: put them into *one* message a step, an all-reduce with MAX.
#
# What becomes of a NaN in it? Two ranks, four amaxes each; all four of one rank are NaN. How many of the four results
# are NaN?

# %%
guess("nans", None, "Of four NaN on rank 0, how many are left after an all-reduce with MAX?")

# %%
# %%ranks 2 --name nan --out nans
import torch
import torch.distributed as dist

for bad in (0, 1):
    amaxes = torch.full((4,), float("nan") if rank == bad else 2.0)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"NaN on rank {bad} alone: {amaxes.tolist()}")
report(int(amaxes.isnan().sum()))

# %%
guessed("nans", nans[0], "of the four, over gloo")

# %% [markdown]
# MAX compares, and a comparison with NaN is false: what is kept depends on which number comes first. gloo passes pieces
# of the message round a ring, so that depends on the rank *and* on the place in the message. ∞ survives anywhere.
#
# **Exercise.** The state of one tensor, and the end of a step for a list of them. `tp.group` is the process group.
# `note` neither changes the tensor nor keeps it: it belongs to the model, which goes on with it.

# %%
# %%exercise delayed_scaling
import torch
import torch.distributed as dist


class DelayedScale:
    """The scale of one tensor, from what it was in the last `history` steps. It starts at 1."""

    def __init__(self, history: int, top: float):
        self.scale = 1.0
        ### BEGIN SOLUTION
        self.history, self.top, self.past, self.amax = history, top, [], torch.zeros(())
        ### END SOLUTION

    def note(self, x: torch.Tensor) -> None:
        ### BEGIN SOLUTION
        self.amax = torch.maximum(self.amax, x.detach().abs().max())
        ### END SOLUTION


def update(scales: list[DelayedScale], tp) -> None:
    """End of a step, on every rank of tp with the same list."""
    ### BEGIN SOLUTION
    together = torch.stack([one.amax for one in scales]).nan_to_num(torch.inf, torch.inf)  # MAX could lose a NaN
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=tp.group)
    for one, amax in zip(scales, together.tolist()):
        finite = amax < float("inf")
        one.past = [*one.past, amax if finite else 0.0][-one.history :]
        if finite and max(one.past) > 0:
            one.scale = one.top / max(one.past)
        one.amax = torch.zeros(())
    ### END SOLUTION


# %%
check("delayed_scaling")

# %% [markdown]
# ### A linear layer
#
# y = x·Wᵀ, and backward dx = dy·W, dW = dyᵀ·x: three products, each of two FP8 factors. Sum in float32, and divide by
# both scales. (Hopper's tensor cores keep only about 14 bits of a sum of FP8 products. So DeepSeek-V3 takes the sum
# out of them after every 128 products, and adds these sums up in float32: section 3.3 of its report.)
#
# By hand: x = 3 with scale 2, W = 5 with scale 4. The casts hold 6 and 20, their product is 120, and 120/(2·4) = 15.
#
# bf16 products take their factors as they lie. Hopper's FP8 products do not: **in both factors the numbers of one sum
# must be neighbours in memory.** So `product(a, b)` is a·bᵀ for two of torch's float8 tensors, a [m, k] and b [n, k],
# each with whole rows, and refuses anything else. x [n, i] and W [o, i] have the right shapes for y. Have they for dW
# and dx? A *transposed copy* is `t.T.contiguous()`; a transposed view has its numbers where they were.
#
# What is kept for the backward pass are FP8 tensors, one byte a number: half of bf16's activation memory, if you keep
# one copy of x and one of W. Which? `t.to(torch.float8_e4m3fn)`, or `torch.float8_e5m2`, stores in one byte what
# `to_fp8` rounded, with no further change.
#
# **Exercise.** The three products, each by `product`. `sx`, `sw` and `sdy` are states as above: use `.scale`, and call
# `.note` with each tensor before it is scaled. Between forward and backward all three scales may change. x and dy lie
# in memory as the operations beside this one left them. They and W belong to the caller: leave them as they are.
# Besides one FP8 copy of each keep nothing large: the check looks at all that lives after the forward pass and did not
# live before.

# %%
# %%exercise fp8_linear
import torch
from exercises.to_fp8 import to_fp8

from course.lab07.tensor_cores import product

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


class Fp8Linear(torch.autograd.Function):
    """x [n, i], weight [o, i] -> x weight^T [n, o], all float32."""

    @staticmethod
    def forward(ctx, x, weight, sx, sw, sdy):
        ### BEGIN SOLUTION
        sx.note(x)
        sw.note(weight)
        ctx.scales, ctx.sdy = (sx.scale, sw.scale), sdy
        qx = to_fp8(x * sx.scale, *E4M3).to(torch.float8_e4m3fn).contiguous()
        qw = to_fp8(weight * sw.scale, *E4M3).to(torch.float8_e4m3fn)
        ctx.save_for_backward(qx.T.contiguous(), qw.T.contiguous())
        return product(qx, qw) / (sx.scale * sw.scale)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        """dx, dweight, and nothing for the three states."""
        ### BEGIN SOLUTION
        (qx, qw), (scale_x, scale_w), sdy = ctx.saved_tensors, ctx.scales, ctx.sdy
        sdy.note(dy)
        qdy = to_fp8(dy * sdy.scale, *E5M2).to(torch.float8_e5m2).contiguous()
        dx = product(qdy, qw) / (sdy.scale * scale_w)
        return dx, product(qdy.T.contiguous(), qx) / (sdy.scale * scale_x), None, None, None
        ### END SOLUTION


# %%
check("fp8_linear")

# %% [markdown]
# Six copies are made in a step, two of each tensor, and two outlive the forward pass: xᵀ and Wᵀ. A transposed copy made
# later is one more pass over memory, so Transformer Engine's cast writes both copies at once, while the numbers are on
# the chip. With one scale a tensor they hold the same numbers. With tiles they do not: tiles lie along the sum, so
# those of xᵀ are other tiles, and to cast them from the first copy would round twice. Then both are cast from x in
# bf16.

# %% [markdown]
# ## 4 · Run
#
# ### Training in FP8 on two ranks
#
# A Llama of two layers, tensor parallel. Its MLPs are yours: two FP8 linear layers in each, with delayed scales that
# the ranks share. The package builds its layers from a specification, so a class can take another one's place. The
# folded cell trains it for 40 steps, and beside it the same model in float32, and reports both curves of the loss.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs to_fp8,delayed_scaling,fp8_linear --name train_fp8 --timeout 170 --out trained
import itertools

import torch
import torch.nn.functional as F
from exercises.delayed_scaling import DelayedScale, update
from exercises.fp8_linear import Fp8Linear

from minimegatron.comm.collectives import all_gather, copy_to_region, reduce_from_region
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.layers.mlp import MLP
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.families import family_config

STEPS, SEQ, BATCH = 40, 64, 8
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
config = family_config("llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256)


class Fp8MLP(MLP):
    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        self.tp = mesh.tp
        with torch.device("cpu"):  # a model is built on "meta", where tensors have no numbers
            self.scales = [[DelayedScale(16, top) for top in (448.0, 448.0, 57344.0)] for _ in range(2)]

    def forward(self, x):
        x = copy_to_region(x, self.tp)
        gate, up = self.linear(x, self.linear_fc1, 0).chunk(2, -1)
        return reduce_from_region(self.linear(F.silu(gate) * up, self.linear_fc2, 1), self.tp)

    def linear(self, x, layer, which):
        return Fp8Linear.apply(x.flatten(0, 1), layer.weight, *self.scales[which]).unflatten(0, x.shape[:2])


plain = decoder_layer_spec(config)
models = {
    "fp32": build_model(config, mesh, 1, plain),
    "fp8": build_model(config, mesh, 1, plain.with_submodule("mlp", ModuleSpec(Fp8MLP))),
}
scales = [one for m in models["fp8"].modules() if isinstance(m, Fp8MLP) for three in m.scales for one in three]

text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
places = torch.Generator().manual_seed(5)
batches = [torch.stack([data[a : a + SEQ + 1] for a in torch.randint(len(data) - SEQ, (BATCH,), generator=places)])
           for _ in range(STEPS)]  # fmt: skip
losses = {name: [] for name in models}
for name, model in models.items():
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for rows in batches:
        loss = model(rows[:, :-1], labels=rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        if name == "fp8":
            update(scales, mesh.tp)
        optimizer.step()
        losses[name].append(loss.item())

mine = torch.tensor([one.scale for one in scales])
both = all_gather(mine, mesh.tp).view(2, -1)
if rank == 0:
    print(f"loss per byte fell by more than a third: {losses['fp8'][-1] < losses['fp8'][0] * 2 / 3}")
    last = {name: sum(row[-10:]) / 10 for name, row in losses.items()}
    print(f"the last ten steps, FP8 within 10 % of float32: {abs(last['fp8'] / last['fp32'] - 1) < 0.1}")
    print(f"{len(scales)} scales, equal on both ranks to the last bit: {torch.equal(both[0], both[1])}")
report(losses)

# %%
# %%needs to_fp8 delayed_scaling fp8_linear
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE, styled

with styled():
    fig, ax = plt.subplots(figsize=(7, 2.6))
    for name, line in (("fp32", REFERENCE_LINE), ("fp8", MEASURED_LINE)):
        ax.plot(trained[0][name], label=name, **line)
    ax.set(xlabel="step", ylabel="loss per byte", title="MLPs in FP8, on two ranks")
    ax.legend()
    plt.show()

# %% [markdown]
# The curves run together. On one kind of CPU FP8 ends one percent above, on another one percent below: to add the same
# numbers in another order changes as much. Remember in what follows that a curve like this proves little.
#
# ### On a machine with a GPU
#
# The same texts, compiled by nvcc, on 16384 rows of 4096, and last the norm of section 1 as torch runs it, operation by
# operation. Predicted: 2/7 of the rate of a copy for that one; far less than a copy for `by_rows`; 2/3 to all of it for
# `norm_block` and `norm_warp`, as much as they find a row in a cache when they read it again; close to a copy for
# `norm_registers`. `norm_bf16` moves half the bytes; its rate is of these. And one launch, of a kernel that adds 1 to
# one number, beside the 5 µs that section 2 took. (Without a GPU this cell runs nothing, and predictions stay
# predictions.)

# %% jupyter={"source_hidden": true}
# %%torchrun -n 1 --gpus --needs norm_block,norm_warp,norm_registers,norm_bf16 --name on_gpu --timeout 200
import importlib
import torch
import torch.nn.functional as F
from course.lab07 import by_rows
from minimegatron.launch.rank import finish, init
from minimegatron.kernels.build import KernelsUnavailable

ROWS, WIDTH = 16384, 4096

init()
x, gamma = torch.randn(ROWS, WIDTH, device="cuda"), torch.randn(WIDTH, device="cuda")
want = F.rms_norm(x, (WIDTH,), gamma, 1e-5)

def seconds(function):
    for _ in range(3):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20e3

y = torch.empty_like(x)
copy = 2 * x.nbytes / seconds(lambda: y.copy_(x))
def operations(x, gamma, eps):
    return (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()) * gamma

one = torch.zeros(1, device="cuda")
launch = seconds(lambda: one.add_(1))
learners = ("norm_block", "norm_warp", "norm_registers", "norm_bf16")
ways = {name: importlib.import_module(f"exercises.{name}").norm for name in learners}
for name, norm in {"by_rows": by_rows.norm, **ways, "operations": operations}.items():
    given = (x.bfloat16(), gamma.bfloat16()) if name == "norm_bf16" else (x, gamma)
    try:
        got = norm(*given, 1e-5)
    except KernelsUnavailable as missing:
        print(f"your kernels cannot be compiled for this GPU: {missing.what}; {missing.fix}")
        break
    right = torch.allclose(got.float(), want, atol=1e-4, rtol=4 * torch.finfo(got.dtype).eps)
    rate = 2 * got.nbytes / seconds(lambda: norm(*given, 1e-5))
    print(f"{name:14} right: {right}   {rate / 1e9:6.0f} GB/s, {rate / copy:4.0%} of a copy")
else:
    print(f"one launch from Python: {1e6 * launch:.1f} us")
finish()

# %% [markdown]
# ## 5 · See
#
# ### The roofline of this computer
#
# The same picture, measured: how fast this machine multiplies and how fast it copies, on one core; then programs
# against that roof. Four of them are ways to the same norm of 2048 x 4096 numbers. Guess which ones reach the roof,
# before you run the cell. The folded cell runs each three times, in turn, and keeps the best.
#
# * *operation by operation*: `rms_norm` of section 1. Each operation makes a fresh tensor of 32 MiB.
# * *the same, into tensors that are there*: the same operations, their results written with `out=`.
# * *16 rows at a time*: the same operations on 256 KiB, which stay in a cache until the last of them is done.
# * *torch's own*: `F.rms_norm`, which on a CPU (torch 2.13) makes the norm of the same operations, in fresh tensors.

# %% tags=["hide-output"] jupyter={"source_hidden": true}
import time

import torch
import torch.nn.functional as F

from minimegatron.viz.roofline import roofline

n = 1024
a, b = torch.randn(n, n), torch.randn(n, n)
x, gamma, y = torch.randn(2048, 4096), torch.randn(4096), torch.empty(2048, 4096)
between, vector, few = torch.empty(2048, 4096), torch.randn(4096), torch.randn(4096, 16)


def into(x, between, y):
    torch.pow(x, 2, out=between)
    rstd = (between.mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.mul(x, rstd, out=between)
    torch.mul(between, gamma, out=y)


def by_rows(rows=16):
    for i in range(0, len(x), rows):
        into(x[i : i + rows], between[:rows], y[i : i + rows])


size = x.numel()
programs = {  # FLOP, bytes, and what runs
    "norm, operation by operation": (4 * size, 7 * x.nbytes, lambda: rms_norm(x, gamma)),
    "the same, into tensors that are there": (4 * size, 7 * x.nbytes, lambda: into(x, between, y)),
    "norm, 16 rows at a time": (4 * size, 2 * x.nbytes, by_rows),
    "norm, torch's own": (4 * size, 7 * x.nbytes, lambda: F.rms_norm(x, (4096,), gamma)),
    "matrix x vector": (2 * size, x.nbytes, lambda: x @ vector),
    "matrix x 16 vectors": (32 * size, x.nbytes, lambda: x @ few),
    "matrix x matrix": (2 * n**3, 12 * n * n, lambda: a @ b),
    "copy": (1, 2 * x.nbytes, lambda: y.copy_(x)),
}
threads = torch.get_num_threads()
torch.set_num_threads(1)
best = dict.fromkeys(programs, float("inf"))
for _ in range(3):
    for name, (_, _, run) in programs.items():
        start = time.thread_time()  # of this core, whatever else runs on the machine
        run()
        best[name] = min(best[name], time.thread_time() - start)
torch.set_num_threads(threads)
bandwidth = 2 * x.nbytes / best.pop("copy")
measured = {name: (programs[name][0] / programs[name][1], programs[name][0] / took) for name, took in best.items()}
peak = max(rate for _, rate in measured.values())
fused = best["norm, 16 rows at a time"] / best["the same, into tensors that are there"]
named = {f"{name}: {fused:.2f} of that time" if name == "norm, 16 rows at a time" else name: at
         for name, at in measured.items()}  # fmt: skip
roofline({"one core": (peak, bandwidth)}, named, "Measured here, in float32")

# %% [markdown]
# The fastest product defines the flat part and the copy defines the slope. Four of the points are norms.
#
# *Into tensors that are there*: seven times 32 MiB, as fast as a copy moves them. The norm waits for memory, as
# predicted. *Operation by operation* is far below: a fresh tensor of 32 MiB is memory that the operating system hands
# out page by page, zeroed, when it is first written, and that can take longer than the norm itself. (torch on a GPU
# keeps its memory and hands it out again, so there it costs nothing.) *torch's own* does the same. *16 rows at a time*
# moves two times 32 MiB in place of seven. If memory were all, it would take 2/7 = 0.29 of the time of *into tensors
# that are there*. What it takes here stands beside the picture. Where its point is below the roof, memory is not the
# bound any more: the numbers are in a cache, and the arithmetic of one core takes most of the time. The faster the
# memory beside that core, the less does fusing give.
#
# A point above the slope is no mistake: reading alone is faster than reading and writing, and what fits into a cache
# need not come from memory.
#
# ### What a launch costs here
#
# A CPU has no launches, but every operation of torch costs its call: Python, the choice of the function, the result's
# tensor. `y.copy_(x)` of a growing x: from how many numbers on does the copy take longer than the call?

# %%
guess("knee", None, "From how many numbers on does a copy take longer than the call of it?")

# %% tags=["hide-output"] jupyter={"source_hidden": true}
import time

import matplotlib.pyplot as plt
import torch

from minimegatron.viz.picture import MEASURED_LINE, PREDICTED_LINE, styled

threads = torch.get_num_threads()
torch.set_num_threads(1)
source, target = torch.zeros(2**22), torch.zeros(2**22)
sizes, took = [2**k for k in range(0, 23, 2)], []
for n in sizes:
    x, y = source[:n], target[:n]
    times = max(1, min(200, 2**20 // n))
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(times):
            y.copy_(x)
        best = min(best, (time.thread_time() - start) / times)
    took.append(best)
torch.set_num_threads(threads)
launch, per_number = took[0], took[-1] / sizes[-1]
with styled():
    fig, ax = plt.subplots(figsize=(7, 2.6))
    ax.plot(sizes, [1e6 * t for t in took], "o", label="measured", **MEASURED_LINE | {"linestyle": "-"})
    longer = [1e6 * max(launch, n * per_number) for n in sizes]
    ax.plot(sizes, longer, label="the longer of call and copy", **PREDICTED_LINE)
    ax.set(xscale="log", yscale="log", xlabel="numbers of float32", ylabel="µs a copy",
           title=f"The call takes {1e6 * launch:.1f} µs, as long as the copy of {launch / per_number:,.0f} numbers")
    ax.legend()
    plt.show()

# %% [markdown]
# Left of the knee a copy costs its call, whatever its size. Right of it, as long as x fits into a cache, a copy is
# faster than the dashed line, which is of the memory. On a GPU the picture is the same, with 5 µs and 3.35 TB/s: 4.2
# million bf16 numbers are read and written in that time, 1000 tokens of width 4096. A layer that decodes a few tokens
# lies far to the left of it: that is what CUDA graphs are for.
#
# ### The error of each recipe
#
# A tensor of 64 x 512 normal numbers, three times: as it is; with one outlier a million times larger; and eight times
# larger than in the step before. Three recipes: a delayed scale from the step before, a current scale, and MX tiles of
# 1 x 32. The bars show the error of the ordinary numbers, relative to their size. Which bars will be high? Guess before
# you run the cell.

# %% tags=["hide-output"]
# %%needs to_fp8 tile_scales
import torch

from course.figures.kernels import error_bars

g = torch.Generator().manual_seed(0)
before = torch.randn(64, 512, generator=g)
outlier = torch.randn(64, 512, generator=g)
outlier[5, 77] = 1e6
tensors = {"as before": torch.randn(64, 512, generator=g), "one outlier": outlier,
           "grown by 8": 8 * torch.randn(64, 512, generator=g)}  # fmt: skip
ordinary = torch.ones(64, 512, dtype=torch.bool)
ordinary[5, 77] = False


def error(x, scale):
    back = to_fp8(x * scale, *E4M3) / scale
    return ((back - x)[ordinary].norm() / x[ordinary].norm()).item()


recipes = {
    "delayed": lambda x: 448.0 / before.abs().max(),
    "current": lambda x: 448.0 / x.abs().max(),
    "MX tiles": lambda x: torch.exp2(127.0 - tile_scales(x, (1, 32), 448.0).float()).repeat_interleave(32, 1),
}
errors = {name: [error(x, scale(x)) for x in tensors.values()] for name, scale in recipes.items()}
error_bars([*tensors], errors, "Three tensors, three recipes, E4M3")

# %% [markdown]
# About 2.6 % is what three mantissa bits cost, whatever the scale. An outlier makes a current scale push nearly all
# others below half of 2^-9: they round to 0. Tiles lose one tile of 1024. A tensor that grows is cut off by a delayed
# scale; in the next step the history knows. (The delayed scale survives the outlier because it does not know of it: it
# cuts the outlier off.)
#
# ## 6 · Break it
#
# Current scaling under tensor parallelism. A row-parallel layer: each rank has a half of the input features, x₀ and
# x₁, and a half of W. It casts its halves, multiplies, and the products are summed over the ranks. A colleague saves
# work: "divide by the scales once, *after* the sum, instead of every rank before". The folded cell holds this layer in
# a small network on two ranks, and the same network in float32 in one process. It prints the losses and, of the first
# step, the norms of the gradients; it reports each rank's output of the first step, and each rank's own product in
# float32.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs to_fp8 --name suspect --out evidence
import torch
import torch.distributed as dist
from exercises.to_fp8 import to_fp8

H, F_, N = 32, 64, 256
half = slice(rank * F_ // 2, (rank + 1) * F_ // 2)


def cast(x):
    scale = 448.0 / x.abs().max().item()
    return to_fp8(x * scale, 3, -6, 448.0), scale


class RowParallel(torch.autograd.Function):
    """x_0 W_0^T + x_1 W_1^T, each product on its rank."""

    @staticmethod
    def forward(ctx, x, weight):
        (qx, sx), (qw, sw) = cast(x), cast(weight)
        ctx.save_for_backward(x, weight)
        y = qx @ qw.T
        dist.all_reduce(y)
        return y / (sx * sw)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x


g = torch.Generator().manual_seed(9)
first, second = torch.randn(F_, H, generator=g) / H**0.5, torch.randn(H, F_, generator=g) / F_**0.5
teacher = torch.randn(H, H, generator=g) / H**0.5
mine = [first[half].clone().requires_grad_(), second[:, half].clone().requires_grad_()]
twin = [first.clone().requires_grad_(), second.clone().requires_grad_()]
optimizers = [torch.optim.Adam(p, lr=3e-3) for p in (mine, twin)]
for step in range(101):
    x = torch.randn(N, H, generator=g)
    target = torch.tanh(x @ teacher.T)
    hidden, whole = torch.relu(x @ mine[0].T), torch.relu(x @ twin[0].T)
    y, want = RowParallel.apply(hidden, mine[1]), whole @ twin[1].T
    loss, twin_loss = ((y - target) ** 2).mean(), ((want - target) ** 2).mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    twin_loss.backward()
    if step == 0:
        report((y.detach(), (hidden @ mine[1].T).detach()))
        of_twin = [twin[0].grad[half], twin[1].grad[:, half]]
        norms = [torch.stack([g.norm() for g in one]).norm().item() for one in ([p.grad for p in mine], of_twin)]
    if step % 50 == 0 and rank == 0:
        print(f"step {step:3}  loss   FP8, two ranks {loss.item():.2f}   float32, one process {twin_loss.item():.2f}")
    for optimizer in optimizers:
        optimizer.step()
print(f"first step, gradient norm of this rank's weights: {norms[0]:.2f}   in one process {norms[1]:.2f}")

# %% [markdown]
# The loss falls, and FP8 is known to cost a little. But compare the losses of step 0, and the gradient norms: one
# rank's is too large, the other's too small. Rounding cannot make such differences: three mantissa bits cost 2.6 % of
# a number, and the errors of thousands of numbers average out in a loss and in a norm.
#
# Look at the first step's output. It should be part 0 + part 1, on both ranks. Both parts are known: each rank's own
# product in float32.
#
# **Exercise.** How much of each part is in each rank's output? Return a list for each rank: the factor of part 0, of
# part 1, and so on.

# %%
# %%exercise shares
import torch


def shares(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> list[list[float]]:
    """outs[r] is the output of rank r, about sum_j c[r][j] parts[j] -> c."""
    ### BEGIN SOLUTION
    columns = torch.stack([part.flatten() for part in parts], 1)
    return [torch.linalg.lstsq(columns, out.flatten()[:, None]).solution.flatten().tolist() for out in outs]
    ### END SOLUTION


# %%
check("shares")

# %%
# %%needs to_fp8 shares
outs, parts = zip(*evidence)
for rank, factors in enumerate(shares(list(outs), list(parts))):
    print(f"rank {rank} has", " and ".join(f"{c:.2f} of part {j}" for j, c in enumerate(factors)))

# %% [markdown]
# Each rank has all of its own part, and the wrong amount of the other's. The factor is the ratio of their scales: the
# ranks scaled by their *own* amax, the products were summed as if by one scale, and each rank divided by its own. So
# the ranks do not even hold the same tensor, and every layer after this one assumes that they do.
#
# The cure is one all-reduce of amax over tp before the cast; then dividing late is right too. Or divide before the
# sum. With scales that are powers of two the mistake is harder to see: the two ranks' scales are equal most of the
# time, and only some layers at some steps are wrong.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you read on. First the guess of the beginning:

# %%
# %%needs flash_bytes
moved = flash_bytes(65536, 128, 128, 64, 2)
guessed("bytes", round(moved["standard"] / moved["flash"], 1), "times fewer bytes, by your flash_bytes")

# %% [markdown]
# Why not thousands? K and V are loaded once for each block of queries, and there are 512 blocks. Twice the rows would
# halve the bytes. What it saves beside bytes is room: S and P of one head would take 8 GiB each.
#
# 1. *A fused norm moves 3.5 times fewer bytes than the eager one. Why not fuse a matrix product?* It is bound by
#    arithmetic: its bytes move while it computes. Fuse what is *around* it: the bias, the activation, the cast.
# 2. *Why is flash attention faster, although it computes P twice?* Arithmetic is cheap left of the ridge. Writing and
#    reading s x s numbers is not.
# 3. *What does a warp shuffle save over shared memory?* A write, a barrier and a read. What it cannot do is cross a
#    warp.
# 4. *Why E5M2 for gradients?* Their sizes differ by more than the range of E4M3, 2^-9 to 448, and a wrong last bit
#    of a gradient hurts less than a gradient that became 0. With a scale for every tile E4M3 is enough, and
#    DeepSeek-V3 uses it.
# 5. *Delayed or current?* Delayed saves a pass over memory and has its scale before the tensor, at the price of one
#    step of clipping when a tensor grows. Current is safe, and costs the pass and a message a tensor.
# 6. *Why must amax be shared over tp, and over dp?* Over tp because ranks hold pieces of one tensor. Over dp, replicas
#    hold identical weights, so amax of W agrees by itself. x and dy differ there: without a shared amax the replicas'
#    scales would differ, and a checkpoint of one replica would not be the state of the others.
# 7. *What stays out of FP8?* Norms, the softmax and the router: they are no large products, and a wrong digit there
#    changes much. The word table and the head, often the first and last layers: their errors reach the loss at once.
#    And everywhere the sums, the master weights and the optimizer's states.
#
# **Exercise.** Numbers for any machine and model. Return a dict:
#
# * `tokens_for_arithmetic`: the fewest tokens n with which x·Wᵀ, [n, h] times [h, h], is no longer bound by memory. x
#   and W are read once and y is written once, `element_size` bytes a number. (h is so large that there is such an n.)
# * `fused_microseconds`: a fused norm of `tokens` tokens of width h, at best, in a long series of them: `launch` is the
#   seconds of a launch;
# * `eager_microseconds`: the same norm by the operations of section 1, each a kernel of its own, at best. Tensors of
#   one number a row take no time to move; their kernels are launched all the same;
# * `amax_bytes`: the payload of the one amax message a step, a float32 for each amax. Each transformer layer has four
#   linear layers, each of these has x, W and dy;
# * `cut_off`: the relative error of a tensor's largest number, when the tensor has become `growth` times as large and
#   the delayed scale does not know yet (the largest used to hit the top exactly);
# * `smallest_kept`: the smallest number that E4M3 holds, other than 0, relative to amax, with scale 448/amax.

# %%
# %%exercise answers
import math


def answers(
    peak: float,
    bandwidth: float,
    hidden: int,
    element_size: int,
    layers: int,
    growth: float,
    tokens: int,
    launch: float,
) -> dict[str, float]:
    """{"tokens_for_arithmetic": ..., "fused_microseconds": ..., "eager_microseconds": ..., "amax_bytes": ..., ...}"""
    ### BEGIN SOLUTION
    ridge, h, e = peak / bandwidth, hidden, element_size
    one = tokens * h * e / bandwidth  # seconds of a pass
    return {
        # 2 n h² / (e (2 n h + h²)) = ridge
        "tokens_for_arithmetic": math.ceil(ridge * e * h / (2 * h - 2 * ridge * e)),
        "fused_microseconds": 1e6 * max(launch, 2 * one),
        "eager_microseconds": 1e6 * (3 * max(launch, 2 * one) + max(launch, one) + 2 * launch),
        "amax_bytes": layers * 4 * 3 * 4,
        "cut_off": 1 - 1 / growth,
        "smallest_kept": 2**-9 / 448,
    }
    ### END SOLUTION


# %%
check("answers")

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | the norms | `kernels/csrc/norm.cu`, `kernels/pointwise.py` | Transformer Engine, Apex |
# | shuffles, block sums, 16 bytes a load | `kernels/csrc/device.h` | Transformer Engine, Apex |
# | CUDA on a CPU | `kernels/csrc/emulator.h`, `course/07_kernels_flash_fp8/given` | not there |
# | flash attention | `kernels/blockwise.py`, `kernels/csrc/flash_attention.cu` | the flash-attn package, Transformer Engine |
# | casts, tiles, transposed copies | `kernels/fp8.py`, `kernels/csrc/fp8.cu` | Transformer Engine |
# | recipes, amax over tp, cp and dp | `layers/fp8/matmul.py`, `layers/fp8/scaling.py`, `layers/fp8/enable.py` | `core/fp8_utils.py`, Transformer Engine's recipes |
#
# Left out here: bank conflicts of shared memory, branches that split a warp, occupancy (all three in *Programming
# Massively Parallel Processors* by Hwu, Kirk and El Hajj), asynchronous copies, and the instructions of tensor cores.
#
# Williams et al. 2009 (doi 10.1145/1498765.1498785) for the roofline; Dao et al. 2022 (arXiv 2205.14135); Dao 2023
# (arXiv 2307.08691); Micikevicius et al. 2022 (arXiv 2209.05433); Rouhani et al. 2023 (arXiv 2310.10537) for MX; Mishra
# et al. 2025 (arXiv 2506.08027); DeepSeek-V3 2024 (arXiv 2412.19437).
#
# Next: lab 08, checkpoints and Hugging Face, where a model leaves the run that made it.
