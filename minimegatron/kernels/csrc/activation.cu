// SwiGLU and bias-GeLU, forward and backward: what stands between the two matrices of an MLP.
//
//   SwiGLU     x = [gate, up], [rows, 2 f] -> [rows, f]:      y = silu(gate) up,   silu(g) = g s,  s = 1 / (1 + exp(-g))
//              dgate = dy up s (1 + g (1 - s)),   dup = dy silu(g)
//   bias-GeLU  y = gelu(x + b), [rows, f]; erf, or Megatron's tanh form;   dx = dy gelu'(x + b),   db = sum over rows of dx
//
// The ladder, and what bounds each step:
//   0  torch: silu, product (or add, gelu)      memory: the intermediate is written and read again
//   1  one kernel, a value a thread             instructions: 2 bytes a load keep few bytes in flight
//   2  16 bytes a load                          memory: every byte moves once. This is what follows
//   3  db: a thread keeps its columns over many rows and writes one partial row, as in norm.cu
// Bound reached by design: SwiGLU forward 4 bytes in, 2 out a value of y; backward 6 in, 4 out. The exponential runs on
// the special function unit, well hidden behind memory.
#include "device.h"

template <typename T, int VEC>
__global__ void __launch_bounds__(256) swiglu_forward(const T* __restrict__ x, T* __restrict__ y, int64_t f, int64_t tiles) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x / tiles, i = blockIdx.x % tiles * blockDim.x + threadIdx.x;
  if (i * VEC >= f) return;
  P g = reinterpret_cast<const P*>(x + 2 * row * f)[i], u = reinterpret_cast<const P*>(x + (2 * row + 1) * f)[i], out;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    A v = load(g.v[j]);
    out.v[j] = store<T>(v / (1 + exp_of(-v)) * load(u.v[j]));
  }
  reinterpret_cast<P*>(y + row * f)[i] = out;
}

template <typename T, int VEC>
__global__ void __launch_bounds__(256) swiglu_backward(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, int64_t f, int64_t tiles) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x / tiles, i = blockIdx.x % tiles * blockDim.x + threadIdx.x;
  if (i * VEC >= f) return;
  P g = reinterpret_cast<const P*>(x + 2 * row * f)[i], u = reinterpret_cast<const P*>(x + (2 * row + 1) * f)[i];
  P d = reinterpret_cast<const P*>(dy + row * f)[i], dg, du;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    A v = load(g.v[j]), s = 1 / (1 + exp_of(-v)), dv = load(d.v[j]);
    dg.v[j] = store<T>(dv * load(u.v[j]) * s * (1 + v * (1 - s)));
    du.v[j] = store<T>(dv * v * s);
  }
  reinterpret_cast<P*>(dx + 2 * row * f)[i] = dg;
  reinterpret_cast<P*>(dx + (2 * row + 1) * f)[i] = du;
}

template <typename A> __device__ __forceinline__ A gelu(A x, bool approximate) {
  if (approximate) return (A)0.5 * x * (1 + tanh_of((A)0.7978845608028654 * (x + (A)0.044715 * x * x * x)));
  return (A)0.5 * x * (1 + erf_of(x * (A)0.7071067811865476));
}
template <typename A> __device__ __forceinline__ A gelu_slope(A x, bool approximate) {
  if (!approximate)
    return (A)0.5 * (1 + erf_of(x * (A)0.7071067811865476)) + x * (A)0.3989422804014327 * exp_of((A)-0.5 * x * x);
  A t = tanh_of((A)0.7978845608028654 * (x + (A)0.044715 * x * x * x));
  return (A)0.5 * (1 + t) + (A)0.5 * x * (1 - t * t) * (A)0.7978845608028654 * (1 + (A)0.134145 * x * x);
}

template <typename T, int VEC>
__global__ void __launch_bounds__(256) bias_gelu_forward(const T* __restrict__ x, const T* __restrict__ b, T* __restrict__ y, int64_t f, int64_t tiles,
                                  bool approximate) {
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x / tiles, i = blockIdx.x % tiles * blockDim.x + threadIdx.x;
  if (i * VEC >= f) return;
  P p = reinterpret_cast<const P*>(x + row * f)[i], q = reinterpret_cast<const P*>(b)[i], out;
#pragma unroll
  for (int j = 0; j < VEC; ++j) out.v[j] = store<T>(gelu<Acc<T>>(load(p.v[j]) + load(q.v[j]), approximate));
  reinterpret_cast<P*>(y + row * f)[i] = out;
}

// Block (tile, part) takes rows part, part + parts, ... of its columns.
template <typename T, int VEC>
__global__ void __launch_bounds__(256) bias_gelu_backward(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ b, T* __restrict__ dx,
                                   Acc<T>* __restrict__ db, int64_t rows, int64_t f, bool approximate) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i * VEC >= f) return;
  A sum[VEC] = {};
  const P q = reinterpret_cast<const P*>(b)[i];
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    P p = reinterpret_cast<const P*>(x + row * f)[i], d = reinterpret_cast<const P*>(dy + row * f)[i], out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      A v = load(d.v[j]) * gelu_slope<A>(load(p.v[j]) + load(q.v[j]), approximate);
      out.v[j] = store<T>(v);
      sum[j] += v;
    }
    reinterpret_cast<P*>(dx + row * f)[i] = out;
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) db[blockIdx.y * f + i * VEC + j] = sum[j];
}

// Threads of a block and blocks of a row of `packs`.
struct Tiles { int threads; int64_t count; };
inline Tiles cut(int64_t packs) {
  int threads = threads_for(packs, 256);
  return {threads, ceil_div(packs, threads)};
}
inline bool bad(int64_t rows, int64_t f) { return rows < 0 || f < 0 || rows * ceil_div(f, 256) > 0x7fffffff; }

// x [rows, 2 f], y [rows, f]
MM_EXPORT mm_swiglu_forward(const void* x, void* y, int64_t rows, int64_t f, int dtype, void* stream) {
  if (rows == 0 || f == 0) return 0;
  if (bad(rows, f)) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    const bool wide = f % VEC == 0 && aligned16(x, y);
    Tiles t = cut(wide ? f / VEC : f);
    if (wide) return MM_LAUNCH((swiglu_forward<T, VEC>), (unsigned)(rows * t.count), t.threads, 0, stream, (const T*)x, (T*)y, f, t.count);
    return MM_LAUNCH((swiglu_forward<T, 1>), (unsigned)(rows * t.count), t.threads, 0, stream, (const T*)x, (T*)y, f, t.count);
  });
}

// dy [rows, f], x, dx [rows, 2 f]
MM_EXPORT mm_swiglu_backward(const void* dy, const void* x, void* dx, int64_t rows, int64_t f, int dtype, void* stream) {
  if (rows == 0 || f == 0) return 0;
  if (bad(rows, f)) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    const bool wide = f % VEC == 0 && aligned16(dy, x, dx);
    Tiles t = cut(wide ? f / VEC : f);
    if (wide) return MM_LAUNCH((swiglu_backward<T, VEC>), (unsigned)(rows * t.count), t.threads, 0, stream, (const T*)dy, (const T*)x, (T*)dx, f, t.count);
    return MM_LAUNCH((swiglu_backward<T, 1>), (unsigned)(rows * t.count), t.threads, 0, stream, (const T*)dy, (const T*)x, (T*)dx, f, t.count);
  });
}

// x, y [rows, f], b [f]
MM_EXPORT mm_bias_gelu_forward(const void* x, const void* b, void* y, int64_t rows, int64_t f, int approximate, int dtype, void* stream) {
  if (rows == 0 || f == 0) return 0;
  if (bad(rows, f)) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    const bool wide = f % VEC == 0 && aligned16(x, b, y);
    Tiles t = cut(wide ? f / VEC : f);
    const unsigned blocks = (unsigned)(rows * t.count);
    if (wide) return MM_LAUNCH((bias_gelu_forward<T, VEC>), blocks, t.threads, 0, stream, (const T*)x, (const T*)b, (T*)y, f, t.count, approximate != 0);
    return MM_LAUNCH((bias_gelu_forward<T, 1>), blocks, t.threads, 0, stream, (const T*)x, (const T*)b, (T*)y, f, t.count, approximate != 0);
  });
}

// dy, x, dx [rows, f], b, db [f], partial Acc<T> [parts, f], 1 <= parts <= rows
MM_EXPORT mm_bias_gelu_backward(const void* dy, const void* x, const void* b, void* dx, void* partial, void* db, int64_t rows,
                                int64_t f, int64_t parts, int approximate, int dtype, void* stream) {
  if (f == 0) return 0;
  if (rows < 1 || f < 0 || parts < 1 || parts > rows || parts > 65535) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    const bool wide = f % VEC == 0 && aligned16(dy, x, b, dx);
    Tiles t = cut(wide ? f / VEC : f);
    dim3 grid((unsigned)t.count, (unsigned)parts);
    int error;
    if (wide) error = MM_LAUNCH((bias_gelu_backward<T, VEC>), grid, t.threads, 0, stream, (const T*)dy, (const T*)x, (const T*)b, (T*)dx, (Acc<T>*)partial, rows, f, approximate != 0);
    else error = MM_LAUNCH((bias_gelu_backward<T, 1>), grid, t.threads, 0, stream, (const T*)dy, (const T*)x, (const T*)b, (T*)dx, (Acc<T>*)partial, rows, f, approximate != 0);
    return error ? error : launch_column_sums<T>(partial, db, parts, f, stream);
  });
}
