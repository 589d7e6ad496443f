"""What the emulator of a learner's kernel sees: races, barriers, bounds, endless loops; and that valid CUDA runs."""

from __future__ import annotations

import pytest
import torch
from course.lab07.compiling import build_library
from course.lab07.emulator import Emulator, KernelError, Launch, LaunchError, fitting
from course.lab07.text import CompileError, kernel_of

from tests.thorough import mostly_thorough


def emulator(text: str, name: str = "") -> Emulator:
    kernel = kernel_of(text, 1, name)
    return Emulator(build_library(text, 1, kernel.name), kernel.name, kernel.parameters, text, 1)


@pytest.fixture(scope="module")
def faults() -> Emulator:
    return emulator(r"""
__device__ float* dead() { float gone[4]; float* p = gone; p[0] = 1; return p; }
__device__ int deep(int n) { float room[64]; room[n > 0 ? n : 0] = n; return n <= 0 ? 0 : deep(n - 1) + deep(n - 2); }
__global__ void faults(const float* x, float* y, int how, int one) {
  __shared__ float parts[64];
  __shared__ float sum;
  int t = threadIdx.x;
  float own[4];
  float* nowhere;
  if (how == 1) { parts[t] = 0; __syncthreads(); parts[0] += x[t]; }
  if (how == 2) { if (t < 32) __syncthreads();
                  else __syncthreads(); }
  if (how == 3) { if (t == 0) __syncthreads(); }
  if (how == 4) parts[t + one] = 1;
  if (how == 5) own[3 + one] = 1;
  if (how == 6) y[t] = __shfl_xor_sync(0x1, x[t], 1);
  if (how == 7) y[t] = parts[t] + 1;
  if (how == 8) while (one) { }
  if (how == 9) y[t] = nowhere[0];
  if (how == 10) { float* p = dead(); y[t] = p[0]; }
  if (how == 11) sum = t;
  if (how == 12) { parts[t] = t; y[t] = parts[63 - t]; }
  if (how == 13) { y[t] = parts[t]; if (t == 0) parts[1] = 2; }
  if (how == 14) y[t] = deep(60);
  if (how == 15) { if (t < 32) y[t] = __shfl_sync(0xffffffff, x[t], 0); else __syncthreads(); __syncthreads(); }
  if (how == 16) y[t + one * 64] = 1;
  if (how == 17) y[t - 2] = 1;
  if (how == 18) y[t] = __shfl_down_sync(0xffffffff, x[t], 1) + __shfl_down_sync(0xffffffff, x[t], 31 * one, 13 + one);
  if (how == 19) { const float* p = x + 1000; y[t] = *p; }
  if (how == 20) y[t] = x[(1ll << 61) - 1];
  if (how == 21) { const float* p = x + (1ll << 60); p += (1ll << 60) - 1; y[t] = *p; }
  if (how == 22) { float4 v = ((const float4*)(x + 1))[0]; y[t] = v.x; }
  if (how == 23) { if (t < 16) y[t] = __shfl_xor_sync(0xffffffff, x[t], 1); __syncthreads(); }
  if (how == 24) { parts[t] = t; if (t < 32) __syncthreads(); y[t] = parts[63 - t]; __syncthreads(); }
  if (how == 30) { parts[t] = x[t]; __syncthreads(); y[t] = parts[63 - t]; }
  if (how == 31) { parts[t] = x[t]; __syncwarp(); y[t] = parts[t ^ 1]; }
  if (how == 32) { if (t == 0) sum = 0; __syncthreads(); atomicAdd(&sum, 1); __syncthreads(); y[t] = sum; }
  if (how == 33) { sum = 7; __syncthreads(); y[t] = sum; }
  if (how == 34) { float v = x[t]; if (t < 16) v += __shfl_down_sync(0xffff, v, 8); y[t] = v; }
  if (how == 35) { if (t < 32) { parts[t] = x[t]; __syncwarp(); y[t] = parts[31 - t]; } else y[t] = 0; }
}
""")


X = torch.arange(64.0)
FAULTS = {
    1: (r"a race: thread 1 of block 0 reads parts\[0\], which thread 0 writes at line 10", 10),
    2: (
        r"thread 32 of block 0 did not meet the barrier of line 11, where thread 0 waits; it waits at that of line 12",
        11,
    ),
    3: (r"thread 1 of block 0 did not meet the barrier of line 13, where thread 0 waits, and has ended", 13),
    4: (r"thread 63 of block 0 uses parts\[64\]; it has 64 numbers", 14),
    5: (r"thread 0 of block 0 uses own\[4\]; it has 4 numbers", 15),
    6: (r"thread 1 calls __shfl_xor_sync with the mask 0x1, which does not name its own lane 1", 16),
    8: (r"stuck: after 100000 steps", 18),
    9: (r"a pointer that points to no array", 19),
    10: (r"an array of a function that has ended", 20),
    11: (r"a race: thread 1 of block 0 writes sum\[0\], which thread 0 writes at line 21", 21),
    12: (r"a race: thread 0 of block 0 writes parts\[0\]|a race: thread .* parts\[\d+\], which thread", 22),
    13: (r"a race: thread \d+ of block 0 (reads|writes) parts\[1\]", 23),
    14: (r"stuck|bytes of stack", 3),
    15: (r"thread 32 of block 0 did not meet the barrier of line 25, where thread 0 waits", 25),
    16: (r"thread 0 of block 0 writes y\[64\]; it has 64 numbers", 26),
    17: (r"thread 0 of block 0 writes y\[-2\]", 27),
    18: (r"a shuffle among 14 lanes", 28),
    19: (r"thread 0 of block 0 reads x\[1000\]; it has 64 numbers", 29),
    20: (r"thread 0 of block 0 uses a pointer that points to no array", 30),
    21: (r"thread 0 of block 0 uses a pointer that points to no array", 31),
    23: (
        r"thread 0 waits in a shuffle .* mask 0xffffffff names lane 16, too; thread 16 waits at the __syncthreads\(\) "
        r"of line 33",
        33,
    ),
    # a race comes of it, but the barrier is the cause
    24: (r"thread 32 of block 0 did not meet the barrier of line 34.*it waits at that of line 34: .* an `if`", 34),
    22: (r"716: thread 0 of block 0 reads x\[1\] as float4: no multiple of 16 bytes", 32),
}


def launched(kernel: Emulator, how: int, order: int = 0) -> tuple[torch.Tensor, Launch]:
    y = torch.full((64,), torch.nan)
    return y, kernel.launch([X, y, how, 1], 1, 64, order=order, steps=100_000)


@pytest.mark.parametrize("order", mostly_thorough([0, 1, 5], [0, 2]))
@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_ends_the_launch_and_says_what_where_and_by_whom(faults: Emulator, how: int, order: int) -> None:
    words, line = FAULTS[how]
    with pytest.raises(LaunchError) as error:
        launched(faults, how, order)
    assert error.value.line == line or how == 15
    if order == 0:
        error.match(words)
    y, _ = launched(faults, 30)  # and the next launch is a clean one
    assert torch.equal(y, X.flip(0))


@pytest.mark.parametrize("order", [0, 1, 5])
def test_what_is_no_race_is_none(faults: Emulator, order: int) -> None:
    half = X + torch.where(X < 8, X + 8, 0.0)
    wants = {30: X.flip(0), 31: X.view(32, 2).flip(1).flatten(), 32: torch.full((64,), 64.0),
             33: torch.full((64,), 7.0), 35: torch.cat((X[:32].flip(0), torch.zeros(32)))}  # fmt: skip
    for how, want in wants.items():
        y, done = launched(faults, how, order)
        assert torch.equal(y, want), how
        assert done.note == ""
    y, _ = launched(faults, 34, order)
    assert torch.equal(y[:8], half[:8])


def test_a_word_that_is_read_before_it_is_written_is_noted(faults: Emulator) -> None:
    y, done = launched(faults, 7)
    assert y.isnan().all()
    assert done.note == "line 17: thread 0 of block 0 reads parts[0], which was never written"
    _, done = launched(faults, 34)
    assert "takes a value from lane" in done.note and done.note.startswith("line 39: ")


def test_a_variable_without_a_value_is_never_right_by_luck() -> None:
    """NaN, or a number so large that an access with it is out of bounds; one that gets its value later is as any."""
    unset = emulator(r"""
struct Pair { float a; int b; };
__global__ void unset(const float* x, float* y, int how) {
  int t = threadIdx.x;
  float sum, later;
  float own[2];
  float4 four;
  Pair pair;
  int at;
  for (int i = 0; i < 4; ++i) sum += x[i];
  own[0] += x[t], four.y += x[t], pair.a += x[t];
  later = 2 * x[t];
  if (how == 0) y[t] = sum;
  if (how == 1) y[t] = own[0];
  if (how == 2) y[t] = four.y;
  if (how == 3) y[t] = pair.a;
  if (how == 4) y[at + t] = 1;
  if (how == 5) y[t] = later;
}
""")
    for how in range(4):
        assert launched_unset(unset, how).isnan().all(), how
    with pytest.raises(LaunchError, match="it has 64 numbers"):
        launched_unset(unset, 4)
    assert torch.equal(launched_unset(unset, 5), 2 * X)


def launched_unset(kernel: Emulator, how: int) -> torch.Tensor:
    y = torch.zeros(64)
    kernel.launch([X, y, how], 1, 64)
    return y


def test_each_number_that_is_written_is_known(faults: Emulator) -> None:
    _, done = launched(faults, 30)
    assert done.writes["y"].tolist() == [1] * 64
    _, done = launched(faults, 33)
    assert done.counts["shared_loads"] == 1 and done.counts["barriers"] == 1 and done.counts["atomics"] == 0
    _, done = launched(faults, 32)
    assert done.counts["atomics"] == 64
    with pytest.raises(LaunchError):
        launched(faults, 17)


def test_valid_cuda_runs() -> None:
    """Each row of y is one way to say y = 2 x."""
    kernel = emulator(r"""
#define TWICE(v) ((v) + (v))
#define N 64
#define LAST (N - 1)
constexpr int ROW = N;
constexpr float TABLE[] = {1.f, 2.f};
struct Pair { float a, b; int at[2]; };
using real = float;
template <class T, int K = 2> __device__ __forceinline__ T times(T v) { return K * v; }
template <typename T> __device__ T first(const T* p) { return p[0]; }
__device__ inline float from(const float* __restrict__ p, int i) { return p[i]; }
__device__ const float* row_of(const float* x, int i) { return x + i; }
__device__ void put(float* p, float v) { *p = v; }
__device__ void add(float& to, float v) { to += v; }
__global__ void __launch_bounds__(64)
valid(const float* const __restrict__ x, float *__restrict__ y, int n, int * counts) {
  const int t = threadIdx.x, lane = t % warpSize;
  const float* a = x, * b = y;
  const float* r = &x[0 * n];
  const float* const end = x + n;
  float *out = &y[t], own[4] = {1, 2}, none[3] = {};
  *out = 2 * *(a + t);  out += N;                                                  // row 0
  *out = TWICE(r[t]);  out += ROW;
  put(out, times<float>(x[t])); out += N;
  put(&y[3 * N + t], times<real, 2>(from(x, t))); out = out + N;
  if (t < 16) reinterpret_cast<float4*>(y + 4 * N)[t] = make_float4(
      2 * x[4 * t], 2 * x[4 * t + 1], 2 * x[4*t+2], 2 * x[4*t+3]);
  if (t < 16) { float4 v = *(const float4*)&r[4 * t]; v.x *= 2; v.y *= 2; v.z *= 2; v.w *= 2;
                *(float4*)&y[5 * N + 4 * t] = v; }
  for (const float *p = x + t, *q = x; p != end && q < end; p = end) y[6 * N + t] = *p * 2;
  { const float* p = x + t; p++; --p; p += 2; p -= 3; y[7 * N + t] = 2 * p[1]; }
  { auto row = x + t; auto v = row[0]; y[8 * N + t] = v; v *= 2; y[8 * N + t] = v; }
  y[9 * N + t] = __ldg(&x[t]) + __ldg(x + t);
  { Pair p = {x[t], x[t], {t, t}}; y[10 * N + t] = p.a + p.b + 0 * p.at[1]; }
  { float s = 0; add(s, x[t]); add(s, x[t]); y[11 * N + t] = s; }
  { float v = fmaf(x[t], 1.f, x[t]); y[12 * N + t] = max(v, 0.f) + fminf(v, 0.0f) + (own[0] - 1) + none[2]; }
  { int i = (int)(end - x) - N + t; y[13 * N + i] = TABLE[1] * first<float>(row_of(x, i)); }
  { float v = x[t]; v += __shfl_xor_sync(0xffffffffu, v, 0); y[14 * N + t] = v; }
  { __shared__ float rows[2][32], total; __shared__ float4 wide[16];
    rows[t / 32][lane] = x[t]; if (t < 16) wide[t] = ((const float4*)x)[t]; if (!t) total = 0;
    __syncthreads();
    atomicAdd(&total, (float)1); y[15 * N + t] = rows[t / 32][lane] + (&wide[t / 4])->x * (t % 4 == 0)
        + (t % 4 == 1 ? wide[t / 4].y : t % 4 == 2 ? wide[t / 4].z : t % 4 == 3 ? wide[t / 4].w : 0.f); }
  y[16 * N + t] = x[t];
  y[16 * N + t] *= 2.0;
  switch (t & 1) { case 0: y[17 * N + t] = 2 * x[t]; break; default: y[17 * N + t] = x[t] / rsqrtf(4) ; }
  do { y[18 * N + t] = x[t] * (1.f / sqrtf(.25f)); } while (0);
  unsigned int u = t, m = u * 2u; long long big = 1ll << 40;
  if (big > 0 && m == 2 * u) y[19 * N + t] = std::min(x[t], x[t]) * 2;
  y[20 * N + LAST - t] = 2 * *(end - 1 - t);
  atomicAdd(counts + 1, 1); if (t == 0) counts[0] = N; float4 pack = float4{1, 2, 3, 4}; float2 two; two.x = pack.w;
  y[21 * N + t] = x[t] * (two.x - 2); (void)b;
}
""")
    x, y, counts = torch.randn(64), torch.full((22, 64), torch.nan), torch.zeros(2, dtype=torch.int32)
    done = kernel.launch([x, y, 64, counts], 1, 64)
    wrong = [row for row in range(22) if not torch.allclose(y[row], 2 * x)]
    assert wrong == [] and counts.tolist() == [64, 64]
    assert "reads y[512] before the kernel has written it" in done.note or "reads counts[1]" in done.note


COMPILERS = {
    "float z = y;": "cannot convert `float*` to `float`",
    "y[1.5f] = 0;": "an index is an integer",
    "undeclared(1);": "there is no such name here",
    "y[0] = undeclared;": "`undeclared` was not declared",
    "float* p = x;": "invalid conversion from `const float*` to `float*`",
    "x[0] = 1;": "is it const?",
    "float a[n];": "the size of `a` is not known",
    "#include <cooperative_groups.h>": "write __syncthreads(), __syncwarp() and __shfl_*_sync",
    "#include <thrust/sort.h>": "there is no `thrust/sort.h` here",
    'asm volatile("bar.sync 0;");': "no PTX here",
    "k<<<1, 32>>>(x, y, n);": "Python launches it: kernel(",
    "float* p = new float[4];": "take a local array",
}


@pytest.mark.parametrize("text", COMPILERS)
def test_a_mistake_is_told_in_the_words_of_the_text(text: str) -> None:
    with pytest.raises(CompileError) as error:
        emulator(f"__global__ void k(const float* x, float* y, int n) {{\n{text}\n}}")
    assert error.value.line == 2 and COMPILERS[text] in error.value.what
    assert "lab::" not in error.value.what and "me_" not in error.value.what


def test_arguments_are_checked_before_a_launch(faults: Emulator) -> None:
    y = torch.zeros(64)
    wrong = (([X, y, 1 << 40, 1], 1, 64), ([X, y, 10**400, 1], 1, 64), ([X, y, 1, 1], 0, 64), ([X, y, 1, 1], 1, 2048),
             ([X, y, True, 1], 1, 64), ([X, y.double(), 1, 1], 1, 64), ([X, y, 1], 1, 64))  # fmt: skip
    for args, grid, block in wrong:
        with pytest.raises(KernelError):
            fitting("faults", faults.parameters, args, grid, block)
    fitting("faults", faults.parameters, [X, y, 1, 1], 1, 64)
