// Cross entropy of this rank's columns of the vocabulary: two kernels around the collectives of layers/loss.py.
//
//   statistics   one pass over the logits of a row: m = max z, S = sum exp(z - m), the target's z, sum z
//      ... ranks combine: M = max m, lse = M + log sum exp(m - M) S, target = sum of the targets' z ...
//   gradient     dz_j = (exp(z_j - lse) - spread - hit [j is the target]) dloss, from the logits again
//
// The maximum is not known before the end, so a running sum is rescaled whenever it grows: S = S exp(m - m') + exp(z - m').
//
// The ladder, and what bounds each step:
//   0  torch: upcast, max, subtract, exp, sum, divide     memory: fp32 copies of 8192 x 128256 logits, 4 GB a pass
//   1  a block a row, max then sum                        memory: two passes forward; the softmax is stored for backward
//   2  online sum                                         one pass forward; nothing stored but four numbers a row
//   3  the gradient from the logits, in place if wanted   one reading, one writing
// Bound reached by design: 3 passes in all (read; read, write), 2 bytes a logit each. Saved for the backward pass: the
// logits themselves, which their matrix product has written anyway, and [rows] numbers, instead of an fp32 softmax.
#include "device.h"

template <typename A> struct Online { A m, sum; };
template <typename A> __device__ __forceinline__ Online<A> join(Online<A> a, Online<A> b) {
  if (b.m == -infinity<A>()) return a;
  if (a.m == -infinity<A>()) return b;
  const A m = b.m > a.m || b.m != b.m ? b.m : a.m;
  return {m, a.sum * exp_of(a.m - m) + b.sum * exp_of(b.m - m)};
}

template <typename T, int VEC>
__global__ void __launch_bounds__(1024) statistics(const T* __restrict__ z, const int64_t* __restrict__ target, Acc<T>* __restrict__ top,
                           Acc<T>* __restrict__ sum, Acc<T>* __restrict__ picked, Acc<T>* __restrict__ spread, int64_t width,
                           int64_t first, int64_t real) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  MM_SHARED(A, parts_m, 32);
  MM_SHARED(A, parts_s, 32);
  const int64_t row = blockIdx.x;
  Online<A> mine = {-infinity<A>(), 0};
  A all = 0;
  for (int64_t i = threadIdx.x; i * VEC < real; i += blockDim.x) {
    P p = reinterpret_cast<const P*>(z + row * width)[i];
    A top_here = -infinity<A>();
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      A v = load(p.v[j]);
      if (i * VEC + j < real) top_here = v > top_here || v != v ? v : top_here;
    }
    Online<A> here = {top_here, 0};
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if (i * VEC + j >= real) continue;
      A v = load(p.v[j]);
      here.sum += v == top_here ? (A)1 : exp_of(v - top_here);  // equal also where both are infinite
      all += v;
    }
    mine = join(mine, here);
  }
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    Online<A> other = {__shfl_xor_sync(0xffffffffu, mine.m, o), __shfl_xor_sync(0xffffffffu, mine.sum, o)};
    mine = join(mine, other);
  }
  if ((threadIdx.x & 31) == 0) parts_m[threadIdx.x >> 5] = mine.m, parts_s[threadIdx.x >> 5] = mine.sum;
  all = block_sum(all);
  if (threadIdx.x) return;
  for (int w = 1; w < (int)(blockDim.x >> 5); ++w) mine = join(mine, Online<A>{parts_m[w], parts_s[w]});
  top[row] = mine.m, sum[row] = mine.sum, spread[row] = all;
  const int64_t column = target[row] - first;
  picked[row] = column >= 0 && column < real ? (A)load(z[row * width + column]) : (A)0;
}

template <typename T, int VEC>
__global__ void gradient(const T* z, const int64_t* __restrict__ target, const Acc<T>* __restrict__ lse,
                         const Acc<T>* __restrict__ dloss, T* dz, int64_t width, int64_t first, int64_t real, int64_t tiles,
                         Acc<T> hit, Acc<T> spread) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x / tiles, i = blockIdx.x % tiles * blockDim.x + threadIdx.x;
  if (i * VEC >= width) return;
  P p = reinterpret_cast<const P*>(z + row * width)[i], out;
  const A l = lse[row], g = dloss[row];
  const int64_t column = target[row] - first;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int64_t c = i * VEC + j;
    A v = exp_of(load(p.v[j]) - l) - spread - (c == column ? hit : (A)0);
    out.v[j] = store<T>(c < real ? v * g : (A)0);
  }
  reinterpret_cast<P*>(dz + row * width)[i] = out;
}

// z [rows, width], target [rows] global ids; this rank has ids first .. first + real - 1, columns from real on are padding.
// top, sum, picked, spread: Acc<T> [rows].
MM_EXPORT mm_cross_entropy_statistics(const void* z, const void* target, void* top, void* sum, void* picked, void* spread,
                                      int64_t rows, int64_t width, int64_t first, int64_t real, int dtype, void* stream) {
  if (rows == 0) return 0;
  if (rows < 0 || rows > 0x7fffffff || real < 0 || real > width) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    using A = Acc<T>;
    const bool wide = width % VEC == 0 && aligned16(z);
    const int threads = threads_for(wide ? ceil_div(real, VEC) : real, 1024);
    if (wide) return MM_LAUNCH((statistics<T, VEC>), (unsigned)rows, threads, 0, stream, (const T*)z, (const int64_t*)target, (A*)top, (A*)sum, (A*)picked, (A*)spread, width, first, real);
    return MM_LAUNCH((statistics<T, 1>), (unsigned)rows, threads, 0, stream, (const T*)z, (const int64_t*)target, (A*)top, (A*)sum, (A*)picked, (A*)spread, width, first, real);
  });
}

// lse, dloss Acc<T> [rows]; dz [rows, width], which may be z itself.
MM_EXPORT mm_cross_entropy_gradient(const void* z, const void* target, const void* lse, const void* dloss, void* dz, int64_t rows,
                                    int64_t width, int64_t first, int64_t real, double hit, double spread, int dtype, void* stream) {
  if (rows == 0 || width == 0) return 0;
  if (rows < 0 || real < 0 || real > width || rows * ceil_div(width, 256) > 0x7fffffff) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    using A = Acc<T>;
    const bool wide = width % VEC == 0 && aligned16(z, dz);
    const int64_t packs = wide ? width / VEC : width;
    const int threads = threads_for(packs, 256);
    const int64_t tiles = ceil_div(packs, threads);
    const unsigned blocks = (unsigned)(rows * tiles);
    if (wide) return MM_LAUNCH((gradient<T, VEC>), blocks, threads, 0, stream, (const T*)z, (const int64_t*)target, (const A*)lse, (const A*)dloss, (T*)dz, width, first, real, tiles, (A)hit, (A)spread);
    return MM_LAUNCH((gradient<T, 1>), blocks, threads, 0, stream, (const T*)z, (const int64_t*)target, (const A*)lse, (const A*)dloss, (T*)dz, width, first, real, tiles, (A)hit, (A)spread);
  });
}
