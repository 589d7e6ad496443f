"""What a CUDA programmer writes runs in the lab as it stands: a row of y for each construct, y = 2 x."""

from __future__ import annotations

import pytest
import torch
from course.lab07.cuda import CompileError, Kernel, KernelError

from minimegatron.kernels import build

ROWS = {
    "lambda": "auto f = [](float v) { return 2 * v; }; out = f(x[t]);",
    "lambda by reference": "auto f = [&](int i) { return 2 * x[i]; }; out = f(t);",
    "device lambda": "auto f = [=] __device__ (int i) { return 2 * x[i]; }; out = f(t);",
    "function that takes a lambda": "out = apply([](float v) { return 2 * v; }, x[t]);",
    "attribute": "[[maybe_unused]] int unused = 3; out = 2 * x[t];",
    "static __device__ inline": "out = twice_static(x[t]);",
    "functor": "out = Twice{}(x[t]);",
    "methods and constructors": "Scale s(2.f); out = s.of(x[t]);",
    "static function of a policy": "out = applied<Policy>(x[t]);",
    "view with operator[]": "View v{x}; out = 2 * v[t];",
    "members with defaults": "Defaults d; out = d.a * x[t];",
    "template struct": "Pack<float, 4> p = reinterpret_cast<const Pack<float, 4>*>(x)[t / 4]; out = 2 * p.v[t % 4];",
    "specialisation": "out = Factor<float>::value * x[t];",
    "operators of float4": "float4 v = reinterpret_cast<const float4*>(x)[t / 4] * 2.f; out = part(v, t % 4);",
    "operators of two float4": "auto a = ((const float4*)x)[t / 4]; auto v = a + a; out = part(v, t % 4);",
    "namespace": "out = mine::twice(x[t]);",
    "#if": "\n#if defined(FAST) && 1\nout = 2 * x[t];\n#else\nout = 0;\n#endif\n",
    "#pragma unroll, nounroll": "out = 0;\n#pragma unroll 2\nfor (int i = 0; i < 2; ++i) out += x[t];\n",
    "using in a function": "using real = float; real v = x[t]; out = 2 * v;",
    "enum": "enum { N = 2 }; out = N * x[t];",
    "enum class": "out = (int)Mode::twice * x[t];",
    "union": "union { float f; int i; } u; u.f = 2 * x[t]; out = u.f;",
    "__constant__": "out = factors[1] * x[t];",
    "static_assert": "static_assert(sizeof(float4) == 16 && alignof(float4) == 16); out = 2 * x[t];",
    "alignas, __align__": "__align__(16) float v[4]; alignas(16) float w[1]; v[1] = x[t]; w[0] = v[1]; out = 2 * w[0];",
    "nullptr": "const float* p = t < 0 ? nullptr : x; out = p ? 2 * p[t] : 0;",
    "const_cast": "float* p = const_cast<float*>(x); out = 2 * p[t];",
    "volatile": "volatile float v = x[t]; out = 2 * v;",
    "address of a local": "float v = x[t]; float* p = &v; *p *= 2; out = v;",
    "address of a member": "float4 v = {1, 2, 3, 4}; float* p = &v.x; out = p[1] * x[t];",
    "reference to an element": "put(y[(ROW + 0) * n + t], 2 * x[t]); out = y[ROW * n + t];",
    "reference to an array": "float v[2] = {x[t], x[t]}; out = sum(v);",
    "__syncthreads_count": "out = __syncthreads_count(t < 32) / 16 * x[t];",
    "__activemask, clock64": "long long c = clock64(); out = (__activemask() ? 2 : 0) * x[t] + 0 * (c < 0);",
    "assert": "assert(t < n); out = 2 * x[t];",
    "and, not": "out = (t >= 0 and not (t < 0)) ? 2 * x[t] : 0;",
    "uint3, uint4, dim3": "uint3 i = threadIdx; dim3 b(2, 1); uint4 u = {1, 2, 3, 4}; out = u.y * x[i.x] * (b.x - 1);",
    "bf16": "__nv_bfloat16 h = __float2bfloat16(2.f); out = __bfloat162float(h * h) / 2 * x[t];",
    "half2": "half2 h = __floats2half2_rn(1.f, 1.f); h = __hadd2(h, h); out = __low2float(h) * x[t];",
    "uintptr_t": "out = (reinterpret_cast<uintptr_t>(x) & 15) == 0 ? 2 * x[t] : 0;",
    "range for": "float v[] = {x[t], x[t]}; out = 0; for (float one : v) out += one;",
    "structured binding": "auto [a, b] = Two{x[t], x[t]}; out = a + b;",
    "if with an initializer": "if (float v = x[t]; true) out = 2 * v;",
    "arrow return": "auto f = [](float v) -> float { return v + v; }; out = f(x[t]);",
    "variadic template": "out = all_of(x[t], x[t], 0.f);",
    "function pointer": "float (*f)(float) = twice_static; out = f(x[t]);",
    "recursion": "out = power(2, 1) * x[t];",
    "__ldg of a float4": "float4 v = __ldg(reinterpret_cast<const float4*>(x) + t / 4); out = 2 * part(v, t % 4);",
    "memcpy": "float v[4]; memcpy(v, x + t / 4 * 4, sizeof v); out = 2 * v[t % 4];",
    "memcpy of a size that is known later": "float v; std::memcpy(&v, x + t, n / 16); out = 2 * v;",
    "a table of zeros": "static constexpr float zeros[4] = {}; out = 2 * x[t] + zeros[t % 4];",
    "int64": "int64_t at = (int64_t)t; out = 2 * x[at];",
    "shared memory in a function": "out = through_shared<float, 64>(x[t], t);",
    "two-dimensional shared memory": "__shared__ float tile[8][8 + 1]; tile[t / 8][t % 8] = x[t]; __syncthreads();"
    "out = 2 * tile[t / 8][t % 8];",
    "static __shared__": "static __shared__ float s[64]; s[t] = x[t]; __syncthreads(); out = 2 * s[t];",
    "goto": "int i = 0; out = 0; again: out += x[t]; if (++i < 2) goto again;",
    "std": "out = std::max(x[t], x[t]) + std::fmin(x[t], std::numeric_limits<float>::infinity());",
    "shuffle of a double": "double d = __shfl_sync(0xffffffffu, (double)x[t], t % 32); out = 2 * (float)d;",
}
BEFORE = r"""
#pragma once
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cmath>
#define FAST 1
namespace mine { __device__ float twice(float v) { return 2 * v; } namespace { constexpr int ONE = 1; } }
using namespace mine;
enum class Mode { once = 1, twice };
__constant__ float factors[2] = {1.f, 2.f};
static __device__ inline float twice_static(float v) { return 2 * v; }
struct Twice { __device__ float operator()(float v) const { return 2 * v; } };
struct Scale {
  float by;
  __device__ explicit Scale(float by) : by(by) {}
  __device__ float of(float v) const { return by * v; }
};
struct Policy { static __device__ float apply(float v) { return 2 * v; } };
struct View { const float* p; __device__ const float& operator[](int i) const { return p[i]; } };
struct Defaults { float a = 2.f; int b = 0; };
struct Two { float a, b; };
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };
template <typename T> struct Factor { static constexpr int value = 1; };
template <> struct Factor<float> { static constexpr int value = 2; };
template <class F> __device__ float apply(F f, float v) { return f(v); }
template <class P> __device__ float applied(float v) { return P::apply(v); }
template <class... A> __device__ float all_of(A... a) { return (a + ...); }
__device__ float4 operator*(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
__device__ float4 operator+(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ float part(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ void put(float& to, float v) { to = v; }
__device__ float sum(const float (&v)[2]) { return v[0] + v[1]; }
__host__ __device__ constexpr int power(int b, int e) { return e ? b * power(b, e - 1) : 1; }
template <typename T, int N> __device__ T through_shared(T v, int t) {
  __shared__ T room[N];
  room[t] = v;
  __syncthreads();
  return room[t] + room[t];
}
extern "C" __global__ void __launch_bounds__(64, 1) rows(const float* __restrict__ x, float* __restrict__ y, int n) {
  const int t = threadIdx.x;
  float out;
"""


def whole() -> str:
    rows = [
        f"{{\nconstexpr int ROW = {row};\n{text}\ny[ROW * n + t] = out;\n}}\n" for row, text in enumerate(ROWS.values())
    ]
    return f"{BEFORE}{''.join(rows)}}}\n"


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    x, y = torch.randn(64), torch.full((len(ROWS), 64), torch.nan)
    Kernel(whole())(x, y, 64, grid=1, block=64)
    return y - 2 * x


def test_a_copy_by_memcpy_is_counted_and_has_bounds() -> None:
    kernel = Kernel("__global__ void k(const float* x, float* y, int n) { memcpy(y, x, 4 * n); }")
    x, y = torch.randn(8), torch.zeros(8)
    kernel(x, y, 8, grid=1, block=1)
    assert torch.equal(y, x) and (kernel.counts["x"]["read"], kernel.counts["y"]["written"]) == (32, 32)
    with pytest.raises(KernelError, match=r"reads x\[8\]; it has 8 numbers"):
        kernel(x, y, 12, grid=1, block=1)


@pytest.mark.parametrize("construct", ROWS)
def test_a_construct_runs_as_it_is_written(rows: torch.Tensor, construct: str) -> None:
    assert rows[[*ROWS].index(construct)].abs().max() == 0


DYNAMIC = Kernel(
    r"""
extern __shared__ __align__(16) float room[];
template <int B> __global__ void reversed(const float* x, float* y) {
  room[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = room[B - 1 - threadIdx.x];
}
template <typename T> __device__ T* of(unsigned char* p) { return reinterpret_cast<T*>(p); }
__global__ void halves(const double* x, double* y) {
  extern __shared__ unsigned char bytes[];
  double* first = of<double>(bytes);
  first[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = first[threadIdx.x] / 2;
}
""",
    name="reversed<32>",
)


def test_dynamic_shared_memory_and_templates_of_kernels() -> None:
    x, y = torch.randn(32), torch.zeros(32)
    DYNAMIC(x, y, grid=1, block=32, shared_mem=128)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(KernelError, match=r"writes room\[16\]; it has 16 numbers: the launch says shared_mem=bytes"):
        DYNAMIC(x, y, grid=1, block=32, shared_mem=64)
    with pytest.raises(CompileError, match=r"which of reversed, halves\? Write"):
        Kernel(DYNAMIC.source)(x, y, grid=1, block=32)
    with pytest.raises(CompileError, match=r"reversed is a template: say of which"):
        Kernel(DYNAMIC.source, name="reversed")(x, y, grid=1, block=32)
    double = torch.randn(4).double()
    got = torch.zeros_like(double)
    Kernel(DYNAMIC.source, name="halves")(double, got, grid=1, block=4, shared_mem=32)
    assert torch.equal(got, double / 2)


KINDS = Kernel(r"""
#include <cuda_bf16.h>
struct Both { float a; __nv_bfloat16 b; };
__global__ void kinds(const __nv_bfloat16* x, const half* h, const int64_t* at, const bool* on, const uint8_t* byte,
                      const float4* wide, float* y, double by, bool all, long long add, __half last, float* none) {
  int t = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;
  __shared__ __nv_bfloat16 rows[8];
  int mine = threadIdx.y * blockDim.x + threadIdx.x;
  rows[mine] = x[t];
  __syncthreads();
  float sum = (float)rows[mine ^ 1] + __half2float(h[at[t]]) + byte[t] + (float)(by * (all && on[t]));
  sum += add + (float)last;
  if (none == nullptr) y[t] = sum + wide[t / 4].y;
}
""")


def test_every_kind_of_array_and_number_and_grids_of_three_dimensions() -> None:
    whole = torch.randint(-8, 9, (3, 32)).float()  # sums of whole numbers beside 2^20 are exact in any order
    x, h, wide, y = whole[0].bfloat16(), whole[1].half(), whole[2].clone(), torch.zeros(32)
    at, on, byte = torch.randperm(32), torch.rand(32) < 0.5, torch.arange(32, dtype=torch.uint8)
    KINDS(x, h, at, on, byte, wide, y, 0.5, True, 1 << 20, 0.25, None, grid=(2, 2), block=(4, 2, 1))
    want = x.float().view(-1, 2).flip(1).flatten() + h.float()[at] + byte + 0.5 * on + (1 << 20) + 0.25
    assert torch.equal(y, want + wide.view(8, 4)[:, 1].repeat_interleave(4))
    assert (KINDS.counts["x"]["read"], KINDS.counts["at"]["read"], KINDS.counts["wide"]["read"]) == (64, 256, 128)
    with pytest.raises(KernelError, match="x wants a contiguous tensor of torch.bfloat16"):
        KINDS(x.float(), h, at, on, byte, wide, y, 0.5, True, 1, 0.25, None, grid=(2, 2), block=(4, 2))


def test_the_packages_own_norm_runs_as_a_text() -> None:
    text = (build.CSRC / "norm.cu").read_text()
    x, gamma, r = torch.randn(3, 64), torch.randn(64), torch.randn(3, 64)
    y, h, rstd = torch.zeros(3, 64), torch.zeros(3, 64), torch.zeros(3)
    norm = Kernel(text, name="norm_forward<float, 4, 2, false, true>")
    norm(x, r, gamma, None, h, y, None, rstd, 64, 1e-5, grid=3, block=32)
    want = torch.nn.functional.rms_norm(x + r, (64,), gamma, 1e-5)
    torch.testing.assert_close(y, want)
    assert torch.equal(h, x + r)
    assert norm.counts["x"]["read"] == x.nbytes and norm.counts["x"]["loads"] == x.numel() // 4  # the ladder's step 3
    bf16 = Kernel(text, name="norm_forward<__nv_bfloat16, 8, 2, false, false>")
    small = torch.zeros(3, 64).bfloat16()
    bf16(x.bfloat16(), None, gamma.bfloat16(), None, None, small, None, rstd, 64, 1e-5, grid=3, block=32)
    close = torch.nn.functional.rms_norm(x.bfloat16().float(), (64,), gamma.bfloat16().float(), 1e-5)
    torch.testing.assert_close(small.float(), close, rtol=1e-2, atol=1e-2)
