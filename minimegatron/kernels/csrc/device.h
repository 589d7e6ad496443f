// What every kernel of this folder stands on. One source, two compilers: nvcc, and g++ with emulator.h.
//
// Kernels are plain CUDA C++ without torch's headers: a file compiles in a second, and its launchers are C functions
// that Python calls with pointers. A launcher returns 0, an error of CUDA, or MM_BAD_ARGUMENT.
//
// Numbers: T is how a tensor is stored (float, bf16, fp16, double); Acc<T> is how it is computed with (double for
// double, else float). double is there for the tests: in it a kernel must agree with the formula to 1e-12.
#pragma once
#ifdef MM_EMULATE
#include <emulator.h>  // the one that the compiler is told of
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#define MM_SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define MM_DYNAMIC_SHARED(T, name)                         \
  extern __shared__ __align__(16) unsigned char mm_shared[]; \
  T* name = reinterpret_cast<T*>(mm_shared)
#define MM_LAUNCH(kernel, grid, block, smem, stream, ...) \
  ((kernel)<<<(grid), (block), (smem), (cudaStream_t)(stream)>>>(__VA_ARGS__), (int)cudaGetLastError())
// How many blocks of a kernel a multiprocessor holds at once, as its registers allow; into the int `blocks`.
#define MM_RESIDENT(blocks, kernel, threads) ((int)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&(blocks), (kernel), (threads), 0))
#endif
#include <stdint.h>

#define MM_BAD_ARGUMENT (-1)
#define MM_EXPORT extern "C" int
// Run a statement with T bound to the type that a dtype code names; the codes are those of launch.py.
// -DMM_ONLY_DTYPE=code compiles one of them, which is quick: for experiments and compile checks.
#ifdef MM_ONLY_DTYPE
#define MM_COMPILED(code) ((code) == MM_ONLY_DTYPE)
#else
#define MM_COMPILED(code) true
#endif
#define MM_CASE(code, type, ...) \
  case code: if constexpr (MM_COMPILED(code)) { using T = type; __VA_ARGS__ } break;
#define MM_BY_DTYPE(code, ...)                   \
  [&](auto) {                                    \
    switch (code) {                              \
      MM_CASE(0, float, __VA_ARGS__)             \
      MM_CASE(1, __nv_bfloat16, __VA_ARGS__)     \
      MM_CASE(2, __half, __VA_ARGS__)            \
      MM_CASE(3, double, __VA_ARGS__)            \
    }                                            \
    return MM_BAD_ARGUMENT;                      \
  }(0)

template <typename T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <typename T> using Acc = typename AccOf<T>::type;

__device__ __forceinline__ float load(float v) { return v; }
__device__ __forceinline__ double load(double v) { return v; }
__device__ __forceinline__ float load(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float load(__half v) { return __half2float(v); }
template <typename T> __device__ __forceinline__ T store(Acc<T> v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 store<__nv_bfloat16>(float v) { return __float2bfloat16(v); }
template <> __device__ __forceinline__ __half store<__half>(float v) { return __float2half(v); }

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float erf_of(float x) { return erff(x); }
__device__ __forceinline__ double erf_of(double x) { return erf(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }
__device__ __forceinline__ float rsqrt_of(float x) { return rsqrtf(x); }
__device__ __forceinline__ double rsqrt_of(double x) { return rsqrt(x); }
template <typename A> __device__ __forceinline__ A infinity() { return (A)__int_as_float(0x7f800000); }

// Sixteen bytes: what one thread moves at best with one instruction.
template <typename T, int VEC> struct alignas(sizeof(T) * VEC) Pack { T v[VEC]; };
template <typename T> __host__ __device__ constexpr int vector_width() { return 16 / (int)sizeof(T); }
inline bool aligned16(const void* p) { return ((uintptr_t)p & 15) == 0; }
template <typename... P> bool aligned16(const void* p, P... more) { return aligned16(p) && aligned16(more...); }

// f(i, k) for every pack i of a row that is this thread's. PER > 0: at most PER of them, unrolled, so that arrays indexed
// by k stay in registers (a loop whose length is unknown at compile time puts them into local memory: slow, silently).
template <int PER, class F> __device__ __forceinline__ void each_pack(int64_t packs, F&& f) {
  if constexpr (PER > 0) {
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      int64_t i = threadIdx.x + (int64_t)k * blockDim.x;
      if (i < packs) f(i, k);
    }
  } else {
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) f(i, 0);
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Whole warps for `work` items, at most `limit` threads.
inline int threads_for(int64_t work, int limit) {
  int64_t t = ceil_div(work > 0 ? work : 1, 32) * 32;
  return t > limit ? limit : (int)t;
}

template <typename A> __device__ __forceinline__ A warp_sum(A v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
template <typename A> __device__ __forceinline__ A warp_max(A v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    A w = __shfl_xor_sync(0xffffffffu, v, o);
    v = w > v || w != w ? w : v;  // a NaN wins
  }
  return v;
}
// Sums of N values over a block of whole warps; every thread gets them. Two barriers: one until all have written, one
// until all have read, because the array is used again.
template <int N, typename A> __device__ __forceinline__ void block_sum(A (&v)[N]) {
  MM_SHARED(A, parts, N * 32);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    v[n] = warp_sum(v[n]);
    if (lane == 0) parts[n * 32 + warp] = v[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = warp_sum(lane < warps ? parts[n * 32 + lane] : (A)0);
  __syncthreads();
}
template <typename A> __device__ __forceinline__ A block_sum(A v) {
  A one[1] = {v};
  block_sum<1>(one);
  return one[0];
}

// Column sums of what the blocks of another kernel have accumulated: partial [parts, cols] -> out [cols]. Eight threads
// share a column, 32 where there are many parts (one thread's loads come one after the other), 32 neighbouring columns a
// block; the order of additions is fixed, so the result repeats bit for bit.
template <typename T>
__global__ void __launch_bounds__(1024) column_sums(const Acc<T>* __restrict__ partial, T* __restrict__ out, int64_t parts, int64_t cols) {
  MM_SHARED(Acc<T>, tile, 32 * 32);
  const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
  Acc<T> v = 0;
  if (c < cols)
    for (int64_t p = threadIdx.y; p < parts; p += blockDim.y) v += partial[p * cols + c];
  tile[threadIdx.y * 32 + threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.y == 0 && c < cols) {
    for (unsigned i = 1; i < blockDim.y; ++i) v += tile[i * 32 + threadIdx.x];
    out[c] = store<T>(v);
  }
}
template <typename T>
int launch_column_sums(const void* partial, void* out, int64_t parts, int64_t cols, void* stream) {
  const dim3 block(32, parts > 64 ? 32 : 8);
  return MM_LAUNCH((column_sums<T>), (unsigned)ceil_div(cols, 32), block, 0, stream, (const Acc<T>*)partial, (T*)out, parts, cols);
}
