// Mixture of experts: rows of tokens to rows of experts and back. Only gathers: nothing is added atomically, so results
// repeat bit for bit.
//
//   slots [n]      row i of the permuted tensor is slot t k + j: the j-th choice of token t; -1: padding, a row of zeros
//   places [t, k]  the inverse: where the j-th choice of token t went; -1: dropped
//
//   permute      out_i = x[slots_i / k]                      backward   dx_t = sum_j dout[places_tj]
//   unpermute    out_t = sum_j p_tj y[places_tj]             backward   dy_i = p[slots_i] dout[slots_i / k]
//                                                                       dp_tj = dout_t . y[places_tj]
//
// The ladder, and what bounds each step:
//   0  index_select, index_add_           memory: weights and rows in separate passes; atomics in the backward pass
//   1  one kernel, a row a block          instructions at 2 bytes a load
//   2  16 bytes a load; the sum over j in registers      memory: n rows in, n rows out, each once
// Bound reached by design: a token's row is read k times by permute, but from the L2 after the first time.
#include "device.h"

// out[i] = weights[slots[i]] x[slots[i] / k], weights null: 1
template <typename T, int VEC>
__global__ void __launch_bounds__(256) gather_rows(const T* __restrict__ x, const int64_t* __restrict__ slots, const Acc<T>* __restrict__ weights,
                            T* __restrict__ out, int64_t k, int64_t h) {
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x, slot = slots[row];
  const Acc<T> w = weights && slot >= 0 ? weights[slot] : (Acc<T>)1;
  for (int64_t i = threadIdx.x; i < h / VEC; i += blockDim.x) {
    P p;
    if (slot >= 0) p = reinterpret_cast<const P*>(x + slot / k * h)[i];
#pragma unroll
    for (int j = 0; j < VEC; ++j) p.v[j] = slot < 0 ? store<T>(0) : weights ? store<T>(w * load(p.v[j])) : p.v[j];
    reinterpret_cast<P*>(out + row * h)[i] = p;
  }
}

// out[t] = sum_j weights[t, j] y[places[t, j]]
template <typename T, int VEC>
__global__ void __launch_bounds__(256) combine_rows(const T* __restrict__ y, const int64_t* __restrict__ places, const Acc<T>* __restrict__ weights,
                             T* __restrict__ out, int64_t k, int64_t h) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t token = blockIdx.x;
  for (int64_t i = threadIdx.x; i < h / VEC; i += blockDim.x) {
    A sum[VEC] = {};
    for (int64_t c = 0; c < k; ++c) {
      const int64_t place = places[token * k + c];
      if (place < 0) continue;
      const P p = reinterpret_cast<const P*>(y + place * h)[i];
      const A w = weights ? weights[token * k + c] : (A)1;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] += w * load(p.v[j]);
    }
    P o;
#pragma unroll
    for (int j = 0; j < VEC; ++j) o.v[j] = store<T>(sum[j]);
    reinterpret_cast<P*>(out + token * h)[i] = o;
  }
}

// dots[t, j] = x[t] . y[places[t, j]]: a warp a choice
template <typename T, int VEC>
__global__ void __launch_bounds__(256) row_dots(const T* __restrict__ x, const T* __restrict__ y, const int64_t* __restrict__ places,
                         Acc<T>* __restrict__ dots, int64_t k, int64_t h) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t token = blockIdx.x, lane = threadIdx.x & 31;
  for (int64_t c = threadIdx.x >> 5; c < k; c += blockDim.x >> 5) {
    const int64_t place = places[token * k + c];
    A sum = 0;
    for (int64_t i = lane; place >= 0 && i < h / VEC; i += 32) {
      const P p = reinterpret_cast<const P*>(x + token * h)[i], q = reinterpret_cast<const P*>(y + place * h)[i];
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum += (A)load(p.v[j]) * (A)load(q.v[j]);
    }
    sum = warp_sum(sum);
    if (lane == 0) dots[token * k + c] = sum;
  }
}

#define MM_BY_ROW(kernel, rows, threads, aligned, ...)                                                            \
  constexpr int VEC = vector_width<T>();                                                                          \
  if (h % VEC == 0 && (aligned)) return MM_LAUNCH((kernel<T, VEC>), (unsigned)(rows), threads, 0, stream, __VA_ARGS__); \
  return MM_LAUNCH((kernel<T, 1>), (unsigned)(rows), threads, 0, stream, __VA_ARGS__);

// x [t, h] -> out [n, h]; weights Acc<T> [t k] or null
MM_EXPORT mm_gather_rows(const void* x, const void* slots, const void* weights, void* out, int64_t n, int64_t k, int64_t h,
                         int dtype, void* stream) {
  if (n == 0 || h == 0) return 0;
  if (n < 0 || n > 0x7fffffff || k < 1) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    MM_BY_ROW(gather_rows, n, threads_for(h / 8, 256), aligned16(x, out), (const T*)x, (const int64_t*)slots, (const Acc<T>*)weights, (T*)out, k, h)
  });
}

// y [n, h] -> out [t, h]; weights Acc<T> [t, k] or null
MM_EXPORT mm_combine_rows(const void* y, const void* places, const void* weights, void* out, int64_t t, int64_t k, int64_t h,
                          int dtype, void* stream) {
  if (t == 0 || h == 0) return 0;
  if (t < 0 || t > 0x7fffffff || k < 1) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    MM_BY_ROW(combine_rows, t, threads_for(h / 8, 256), aligned16(y, out), (const T*)y, (const int64_t*)places, (const Acc<T>*)weights, (T*)out, k, h)
  });
}

// x [t, h], y [n, h] -> dots Acc<T> [t, k]
MM_EXPORT mm_row_dots(const void* x, const void* y, const void* places, void* dots, int64_t t, int64_t k, int64_t h, int dtype,
                      void* stream) {
  if (t == 0) return 0;
  if (t < 0 || t > 0x7fffffff || k < 1) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    MM_BY_ROW(row_dots, t, threads_for(k * 32, 256), aligned16(x, y), (const T*)x, (const T*)y, (const int64_t*)places, (Acc<T>*)dots, k, h)
  });
}
