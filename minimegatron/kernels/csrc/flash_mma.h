// Attention's forward pass on tensor cores: step 4 of the ladder in flash_attention.cu, for bf16 and fp16.
//
// mma.sync multiplies a 16 x 16 tile A by a 16 x 8 tile B and adds to a 16 x 8 tile C in fp32; the 32 lanes of a warp hold
// the three in registers. Lane 4 g + t has
//
//   A   a[i]: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next        two numbers a register
//   B   b[i]: rows 2 t + 8 i and the next, column g                          rows are what is summed over
//   C   c[j]: row g + 8 (j / 2), column 2 t + j % 2
//
// Two neighbouring tiles C of S = Q K^T are in the places of one tile A: the weights P go from the first product to the
// second without leaving their lane. So a warp owns 16 queries, keeps Q and O in registers, and only K and V pass through
// shared memory, 16 bytes a thread where d is D and memory is aligned. B wants neighbours along the index of the sum: of K
// these are channels, one load; of V they are keys, a row apart, two loads (ldmatrix.trans would turn them on the way).
// A row has D + 8 numbers, so that no two of the 32 lanes of a fragment meet in a bank.
//
// P is rounded to T before it multiplies V, its sum is not. Bound reached by design: the tensor cores' share that is left
// when loading, multiplying and exponentials take turns; FlashAttention-2 lets them overlap.
#pragma once
#include "device.h"

constexpr int KEYS = 64, QUERIES = 64, MMA_THREADS = QUERIES * 2;

template <typename T> struct IsHalf { static constexpr bool value = false; };
template <> struct IsHalf<__half> { static constexpr bool value = true; };
template <typename T> __device__ __forceinline__ uint32_t pack_pair(T low, T high) {
  uint32_t bits;
  T two[2] = {low, high};
  memcpy(&bits, two, sizeof bits);
  return bits;
}
__device__ __forceinline__ uint32_t pair_at(const void* p) { return *reinterpret_cast<const uint32_t*>(p); }

#ifdef MM_EMULATE
namespace emulator {
inline float mma_a[32][16 * 16], mma_b[32][16 * 8];  // a warp each
}
template <typename T> void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int lane = emulator::S.current & 31, warp = emulator::S.current >> 5, g = lane >> 2, t = lane & 3;
  float *A = emulator::mma_a[warp], *B = emulator::mma_b[warp];
  T two[2];
  for (int i = 0; i < 4; ++i) {
    memcpy(two, &a[i], sizeof two);
    for (int h = 0; h < 2; ++h) A[(g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2) + h] = load(two[h]);
  }
  for (int i = 0; i < 2; ++i) {
    memcpy(two, &b[i], sizeof two);
    for (int h = 0; h < 2; ++h) B[(2 * t + 8 * i + h) * 8 + g] = load(two[h]);
  }
  emulator::wait(emulator::WARP);  // all lanes have shown what they hold
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 16; ++k) c[j] += A[(g + 8 * (j / 2)) * 16 + k] * B[k * 8 + 2 * t + j % 2];
  emulator::wait(emulator::WARP);  // and all have read it
}
#else
template <typename T> __device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define MM_MMA(kind)                                                                                                             \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (IsHalf<T>::value) MM_MMA("f16");
  else MM_MMA("bf16");
#undef MM_MMA
}
#endif

// Two neighbouring numbers of a row of x [rows, d], zeros outside.
template <typename T> __device__ __forceinline__ uint32_t pair_of(const T* __restrict__ x, int64_t row, int64_t rows, int c, int d) {
  const T zero = store<T>(0.f);
  return pack_pair<T>(row < rows && c < d ? x[row * d + c] : zero, row < rows && c + 1 < d ? x[row * d + c + 1] : zero);
}

// Rows [first, first + KEYS) of x [rows, d] into shared memory, zeros outside; `wide`: d is D, rows begin at multiples of 16
// bytes.
template <typename T, int D>
__device__ __forceinline__ void fetch_rows(T* tile, const T* __restrict__ x, int64_t first, int64_t rows, int d, bool wide) {
  if (wide) {
    for (int i = threadIdx.x; i < KEYS * D / 8; i += MMA_THREADS) {
      const int r = i / (D / 8), c = i % (D / 8) * 8;
      Pack<T, 8> p;
      if (first + r < rows) {
        p = *reinterpret_cast<const Pack<T, 8>*>(x + (first + r) * D + c);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) p.v[j] = store<T>(0.f);
      }
      *reinterpret_cast<Pack<T, 8>*>(tile + r * (D + 8) + c) = p;
    }
    return;
  }
  for (int i = threadIdx.x; i < KEYS * D; i += MMA_THREADS) {
    const int r = i / D, c = i % D;
    tile[r * (D + 8) + c] = first + r < rows && c < d ? x[(first + r) * d + c] : store<T>(0.f);
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(MMA_THREADS)
    flash_forward_mma(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ out, float* __restrict__ lse,
                      int64_t heads, int64_t groups, int64_t n, int64_t m, int d, bool causal, bool wide, float scale) {
  MM_DYNAMIC_SHARED(T, memory);
  T *K = memory, *V = K + KEYS * (D + 8);
  const int64_t head = blockIdx.y, group = head / heads * groups + head % heads / (heads / groups), first = (int64_t)blockIdx.x * QUERIES;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int64_t row = first + 16 * (threadIdx.x >> 5) + g;  // this lane's queries are `row` and `row + 8`
  q += head * n * d, k += group * m * d, v += group * m * d, out += head * n * d;

  uint32_t a[D / 16][4];
#pragma unroll
  for (int c = 0; c < D / 16; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[c][i] = pair_of(q, row + 8 * (i % 2), n, 16 * c + 2 * t + 8 * (i / 2), d);

  float o[D / 8][4] = {}, top[2] = {-infinity<float>(), -infinity<float>()}, total[2] = {0.f, 0.f};
  int64_t last = causal ? first + QUERIES + m - n : m;
  last = last < m ? last : m;
  for (int64_t key = 0; key < last; key += KEYS) {
    __syncthreads();  // nobody reads the last K and V any more
    fetch_rows<T, D>(K, k, key, m, d, wide);
    fetch_rows<T, D>(V, v, key, m, d, wide);
    __syncthreads();
    float s[KEYS / 8][4], higher[2] = {top[0], top[1]};
#pragma unroll
    for (int b = 0; b < KEYS / 8; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[b][j] = 0.f;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        const T* at = K + (8 * b + g) * (D + 8) + 16 * c + 2 * t;
        const uint32_t keys[2] = {pair_at(at), pair_at(at + 8)};
        multiply_add<T>(s[b], a[c], keys);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t query = row + 8 * (j / 2), other = key + 8 * b + 2 * t + j % 2;
        const bool sees = query < n && other < m && (!causal || other <= query + m - n);
        s[b][j] = sees ? s[b][j] * scale : -infinity<float>();
        higher[j / 2] = s[b][j] > higher[j / 2] || s[b][j] != s[b][j] ? s[b][j] : higher[j / 2];
      }
    }
    float base[2], shrink[2], sum[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = row_max(higher[h]);
      base[h] = most == -infinity<float>() ? 0.f : most;
      shrink[h] = exp_of(top[h] - base[h]);
      top[h] = most;
    }
#pragma unroll
    for (int b = 0; b < KEYS / 8; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[b][j] = exp_of(s[b][j] - base[j / 2]);
        sum[j / 2] += s[b][j];
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = total[h] * shrink[h] + row_sum(sum[h]);
#pragma unroll
    for (int b = 0; b < D / 8; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[b][j] *= shrink[j / 2];
#pragma unroll
    for (int c = 0; c < KEYS / 16; ++c) {
      uint32_t weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&two)[4] = s[2 * c + i / 2];
        weights[i] = pack_pair<T>(store<T>(two[2 * (i % 2)]), store<T>(two[2 * (i % 2) + 1]));
      }
#pragma unroll
      for (int b = 0; b < D / 8; ++b) {
        const T *at = V + (16 * c + 2 * t) * (D + 8) + 8 * b + g, *next = at + D + 8;
        const uint32_t values[2] = {pack_pair<T>(at[0], next[0]), pack_pair<T>(at[8 * (D + 8)], next[8 * (D + 8)])};
        multiply_add<T>(o[b], weights, values);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t query = row + 8 * h;
    if (query >= n) continue;
    const float factor = total[h] == 0.f ? 0.f : 1.f / total[h];
#pragma unroll
    for (int b = 0; b < D / 8; ++b)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (8 * b + 2 * t + j < d) out[query * d + 8 * b + 2 * t + j] = store<T>(o[b][2 * h + j] * factor);
    if (t == 0) lse[head * n + query] = top[h] + log_of(total[h]);
  }
}
