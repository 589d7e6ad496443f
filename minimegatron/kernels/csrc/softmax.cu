// softmax(scale x) over rows of attention scores, causal or masked, forward and backward.
//
//   y_j = exp(scale x_j - m) / sum_i exp(scale x_i - m)       over the keys that the query sees, 0 elsewhere
//   dx_j = scale y_j (dy_j - sum_i dy_i y_i)
//
// Query i of n sees keys j <= i + k - n when causal; a mask of bytes hides further ones (1: hidden). A query that sees
// nothing has y = 0 and dx = 0.
//
// The ladder, and what bounds each step:
//   0  five torch operators               memory, five times: scale, mask, max, subtract and exp, divide
//   1  a block a row, three passes        memory, but passes two and three come from the L2
//   2  the row in registers, 16 bytes a load    memory, once in and once out
//   3  causal: what is hidden is not read       half of the reading is gone; the zeros must still be written
// Bound reached by design: forward 2 bytes in (1 on average if causal), 2 out; backward 4 in (2), 2 out.
#include "device.h"

struct Rows {  // 32 bits where they are divided by: a division of 64 bits is a function call, which costs registers
  unsigned queries, heads_per_mask;
  int64_t keys;
  bool causal;
  __device__ int64_t visible(int64_t row) const {  // keys [0, visible) may be seen
    if (!causal) return keys;
    int64_t end = (unsigned)row % queries + keys - queries + 1;
    return end < 0 ? 0 : end < keys ? end : keys;
  }
  __device__ int64_t mask_at(int64_t row) const {
    const unsigned sample = (unsigned)row / queries, query = (unsigned)row % queries;
    return ((int64_t)(sample / heads_per_mask) * queries + query) * keys;
  }
};

template <typename A> __device__ __forceinline__ A block_max(A v) {
  MM_SHARED(A, parts, 32);
  v = warp_max(v);
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = v;
  __syncthreads();
  v = warp_max((threadIdx.x & 31) < (blockDim.x >> 5) ? parts[threadIdx.x & 31] : -infinity<A>());
  __syncthreads();
  return v;
}

template <typename T, int VEC, int PER>
__global__ void __launch_bounds__(512, 1) softmax_forward(const T* __restrict__ x, const unsigned char* __restrict__ mask, T* __restrict__ y, Rows rows,
                                Acc<T> scale) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  using Scores = Pack<A, VEC>;
  const int64_t row = blockIdx.x, at = row * rows.keys, packs = rows.keys / VEC, end = rows.visible(row);
  const unsigned char* hidden = mask ? mask + rows.mask_at(row) : nullptr;
  Scores kept[PER ? PER : 1];
  auto read = [&](int64_t i) {
    Scores z;
    P p;
    if (i * VEC < end) p = reinterpret_cast<const P*>(x + at)[i];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      int64_t c = i * VEC + j;
      z.v[j] = c < end && !(hidden && hidden[c]) ? load(p.v[j]) * scale : -infinity<A>();
    }
    return z;
  };
  A top = -infinity<A>();
  each_pack<PER>(packs, [&](int64_t i, int k) {
    Scores z = read(i);
    if (PER) kept[k] = z;
#pragma unroll
    for (int j = 0; j < VEC; ++j) top = z.v[j] > top || z.v[j] != z.v[j] ? z.v[j] : top;
  });
  top = block_max(top);
  const bool blind = top == -infinity<A>();
  A sum = 0;
  each_pack<PER>(packs, [&](int64_t i, int k) {
    Scores z = PER ? kept[k] : read(i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      z.v[j] = blind || z.v[j] == -infinity<A>() ? (A)0 : exp_of(z.v[j] - top);
      sum += z.v[j];
    }
    if (PER) kept[k] = z;
  });
  sum = block_sum(sum);
  const A inverse = blind ? (A)0 : 1 / sum;
  each_pack<PER>(packs, [&](int64_t i, int k) {
    Scores z = PER ? kept[k] : read(i);
    P out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      A e = PER ? z.v[j] : blind || z.v[j] == -infinity<A>() ? (A)0 : exp_of(z.v[j] - top);
      out.v[j] = store<T>(e == 0 ? (A)0 : e * inverse);  // hidden stays 0 in a row that has a NaN
    }
    reinterpret_cast<P*>(y + at)[i] = out;
  });
}

template <typename T, int VEC, int PER>
__global__ void __launch_bounds__(512, 1) softmax_backward(const T* __restrict__ dy, const T* __restrict__ y, T* __restrict__ dx, Rows rows, Acc<T> scale) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x, at = row * rows.keys, packs = rows.keys / VEC, end = rows.visible(row);
  P kept_y[PER ? PER : 1], kept_dy[PER ? PER : 1];
  A dot = 0;
  each_pack<PER>(packs, [&](int64_t i, int k) {
    if (i * VEC >= end) return;
    P p = reinterpret_cast<const P*>(y + at)[i], d = reinterpret_cast<const P*>(dy + at)[i];
    if (PER) kept_y[k] = p, kept_dy[k] = d;
#pragma unroll
    for (int j = 0; j < VEC; ++j) dot += i * VEC + j < end ? load(p.v[j]) * load(d.v[j]) : (A)0;
  });
  dot = block_sum(dot);
  each_pack<PER>(packs, [&](int64_t i, int k) {
    P out, p, d;
    const bool seen = i * VEC < end;
    if (seen) {
      p = PER ? kept_y[k] : reinterpret_cast<const P*>(y + at)[i];
      d = PER ? kept_dy[k] : reinterpret_cast<const P*>(dy + at)[i];
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      A w = seen && i * VEC + j < end ? load(p.v[j]) : (A)0;
      out.v[j] = store<T>(w == 0 ? (A)0 : scale * w * (load(d.v[j]) - dot));
    }
    reinterpret_cast<P*>(dx + at)[i] = out;
  });
}

#define MM_ROWS(kernel, aligned, ...)                                                                              \
  constexpr int VEC = vector_width<T>();                                                                           \
  const int64_t packs = r.keys / VEC;                                                                              \
  const int threads = threads_for(ceil_div(packs, 2), 512);                                                       \
  if (r.keys % VEC || !(aligned))                                                                                  \
    return MM_LAUNCH((kernel<T, 1, 0>), (unsigned)rows, threads_for(r.keys, 512), 0, stream, __VA_ARGS__);        \
  if (packs <= 2 * threads) return MM_LAUNCH((kernel<T, VEC, 2>), (unsigned)rows, threads, 0, stream, __VA_ARGS__); \
  return MM_LAUNCH((kernel<T, VEC, 0>), (unsigned)rows, 512, 0, stream, __VA_ARGS__);

// x, y [batch, queries, keys], rows = batch * queries; mask bytes [batch / heads_per_mask, queries, keys] or null.
MM_EXPORT mm_softmax_forward(const void* x, const void* mask, void* y, int64_t rows, int64_t queries, int64_t keys,
                             int64_t heads_per_mask, double scale, int causal, int dtype, void* stream) {
  if (rows == 0 || keys == 0) return 0;
  if (rows < 0 || rows > 0x7fffffff || queries < 1 || rows % queries || heads_per_mask < 1 || heads_per_mask > rows) return MM_BAD_ARGUMENT;
  Rows r{(unsigned)queries, (unsigned)heads_per_mask, keys, causal != 0};
  return MM_BY_DTYPE(dtype, {
    MM_ROWS(softmax_forward, aligned16(x, y), (const T*)x, (const unsigned char*)mask, (T*)y, r, (Acc<T>)scale)
  });
}

MM_EXPORT mm_softmax_backward(const void* dy, const void* y, void* dx, int64_t rows, int64_t queries, int64_t keys,
                              double scale, int causal, int dtype, void* stream) {
  if (rows == 0 || keys == 0) return 0;
  if (rows < 0 || rows > 0x7fffffff || queries < 1 || rows % queries) return MM_BAD_ARGUMENT;
  Rows r{(unsigned)queries, 1, keys, causal != 0};
  return MM_BY_DTYPE(dtype, { MM_ROWS(softmax_backward, aligned16(dy, y, dx), (const T*)dy, (const T*)y, (T*)dx, r, (Acc<T>)scale) });
}
