// Attention without the s x s matrix, forward and backward: kernels/blockwise.py as a kernel, to be read beside it.
//
//   forward    for a tile of queries, tile after tile of keys:  S = scale Q K^T,  m' = max(m, rowmax S),  P = exp(S - m'),
//              l = l exp(m - m') + rowsum P,  O = O exp(m - m') + P V;      out = O / l,  lse = m + log l
//   backward   D = rowsum(dout out),  P = exp(S - lse),  dS = P (dout V^T - D):
//              dQ = scale dS K   one kernel, a tile of queries a block
//              dV = P^T dout, dK = scale dS^T Q   another, a tile of keys a block, over all queries and heads of the group
//   Two kernels compute S twice, but nothing is added atomically: gradients repeat bit for bit.
//
// q, out [b, a, n, d], k, v [b, g, m, d]; causal: query i sees keys j <= i + m - n. A query that sees nothing: 0, lse -inf.
//
// The ladder, and what bounds each step:
//   0  torch, the formula                      memory: s x s scores in fp32, written and read three times
//   1  a query a thread, keys from memory      memory again: each key is read by every query, from the L2
//   2  tiles in shared memory                  shared memory: two loads for each multiply-add
//   3  four threads a row; a thread has 8 scores and 1/4 of the row's output in registers; q, p are read once and used
//      8 (or d/4) times. This is what follows: bound by fp32 multiply-adds (67 TFLOP/s) and shared memory at best
//   4  tensor cores (mma.sync) in bf16, fp16   flash_mma.h, the forward pass; FlashAttention-2 reaches 35-40 % of the rate
//   5  wgmma, TMA, warp specialisation         FlashAttention-3; 75 %. The library's, via SDPA
// Bound reached by design: step 4 forward in 16 bits, step 3 otherwise. It is for reading and for machines without the
// library, not for records.
#include "device.h"

constexpr int TILE = 32, LANES = 4, THREADS = TILE * LANES, MINE = TILE / LANES;  // rows; threads a row; scores a thread

struct Shape {
  int64_t a, g, n, m;
  int d;
  bool causal;
  // [first, last) of queries or keys that a tile beginning at `row` meets
  __device__ int64_t last_key(int64_t row) const {
    const int64_t end = causal ? row + TILE + m - n : m;
    return end < 0 ? 0 : end < m ? end : m;
  }
  __device__ int64_t first_query(int64_t key) const {
    const int64_t begin = causal ? key - (m - n) : 0;
    return begin < 0 ? 0 : begin / TILE * TILE;
  }
  __device__ bool sees(int64_t query, int64_t key) const {
    return query < n && key < m && (!causal || key <= query + m - n);
  }
};

// Rows [first, first + TILE) of x [rows, d] into shared memory, zeros outside. A row has D + 1 places, so that threads that
// read the same channel of neighbouring rows meet different banks.
template <typename T, int D>
__device__ __forceinline__ void fetch(Acc<T>* tile, const T* __restrict__ x, int64_t first, int64_t rows, int d) {
  for (int i = threadIdx.x; i < TILE * D; i += THREADS) {
    const int r = i / D, c = i % D;
    tile[r * (D + 1) + c] = first + r < rows && c < d ? (Acc<T>)load(x[(first + r) * d + c]) : (Acc<T>)0;
  }
}
// dots[i] = row `r` of x . row (lane + 4 i) of y
template <typename A, int D>
__device__ __forceinline__ void multiply(A (&dots)[MINE], const A* x, const A* y, int r, int lane) {
#pragma unroll
  for (int i = 0; i < MINE; ++i) dots[i] = 0;
  for (int c = 0; c < D; ++c) {
    const A v = x[r * (D + 1) + c];
#pragma unroll
    for (int i = 0; i < MINE; ++i) dots[i] += v * y[(lane + LANES * i) * (D + 1) + c];
  }
}
// sum[i] += sum over rows k of y of w[r][k] y[k][lane + 4 i]
template <typename A, int D>
__device__ __forceinline__ void accumulate(A (&sum)[D / LANES], const A* w, const A* y, int r, int lane) {
  for (int k = 0; k < TILE; ++k) {
    const A v = w[r * (TILE + 1) + k];
#pragma unroll
    for (int i = 0; i < D / LANES; ++i) sum[i] += v * y[k * (D + 1) + lane + LANES * i];
  }
}
template <typename A> __device__ __forceinline__ A row_sum(A v) {  // over the four lanes of a row
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
template <typename A> __device__ __forceinline__ A row_max(A v) {
#pragma unroll
  for (int o = 1; o < LANES; o *= 2) {
    const A w = __shfl_xor_sync(0xffffffffu, v, o);
    v = w > v || w != w ? w : v;
  }
  return v;
}
template <typename T, int D>
__device__ __forceinline__ void put(T* __restrict__ x, const Acc<T> (&sum)[D / LANES], Acc<T> factor, int64_t row, int64_t rows, int d, int lane) {
  if (row >= rows) return;
#pragma unroll
  for (int i = 0; i < D / LANES; ++i)
    if (lane + LANES * i < d) x[row * d + lane + LANES * i] = store<T>(sum[i] * factor);
}
#include "flash_mma.h"

template <typename A, int D> constexpr int shared_bytes(int tiles, int squares) {
  return (int)sizeof(A) * TILE * (tiles * (D + 1) + squares * (TILE + 1));
}

template <typename T, int D>
__global__ void flash_forward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ out,
                              Acc<T>* __restrict__ lse, Shape s, Acc<T> scale) {
  using A = Acc<T>;
  MM_DYNAMIC_SHARED(A, memory);
  A *Q = memory, *K = Q + TILE * (D + 1), *V = K + TILE * (D + 1), *P = V + TILE * (D + 1);
  const int64_t head = blockIdx.y, group = head / s.a * s.g + head % s.a / (s.a / s.g), first = (int64_t)blockIdx.x * TILE;
  const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  fetch<T, D>(Q, q + head * s.n * s.d, first, s.n, s.d);
  A top = -infinity<A>(), total = 0, o[D / LANES] = {}, score[MINE];
  for (int64_t key = 0; key < s.last_key(first); key += TILE) {
    __syncthreads();  // nobody reads the last K and V any more
    fetch<T, D>(K, k + group * s.m * s.d, key, s.m, s.d);
    fetch<T, D>(V, v + group * s.m * s.d, key, s.m, s.d);
    __syncthreads();
    multiply<A, D>(score, Q, K, r, lane);
    A higher = top;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      score[i] = s.sees(first + r, key + lane + LANES * i) ? score[i] * scale : -infinity<A>();
      higher = score[i] > higher || score[i] != score[i] ? score[i] : higher;
    }
    higher = row_max(higher);
    const A base = higher == -infinity<A>() ? (A)0 : higher, shrink = exp_of(top - base);
    A sum = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const A p = exp_of(score[i] - base);
      P[r * (TILE + 1) + lane + LANES * i] = p;
      sum += p;
    }
    total = total * shrink + row_sum(sum);
    top = higher;
#pragma unroll
    for (int i = 0; i < D / LANES; ++i) o[i] *= shrink;
    __syncwarp();  // a row of P belongs to four lanes of one warp
    accumulate<A, D>(o, P, V, r, lane);
  }
  put<T, D>(out + head * s.n * s.d, o, total == 0 ? (A)0 : 1 / total, first + r, s.n, s.d, lane);
  if (lane == 0 && first + r < s.n) lse[head * s.n + first + r] = top + log_of(total);
}

// delta = rowsum(dout out), a warp a row
template <typename T>
__global__ void row_products(const T* __restrict__ x, const T* __restrict__ y, Acc<T>* __restrict__ delta, int64_t rows, int d) {
  const int64_t row = blockIdx.x * (int64_t)(blockDim.x >> 5) + (threadIdx.x >> 5);
  if (row >= rows) return;
  Acc<T> sum = 0;
  for (int c = threadIdx.x & 31; c < d; c += 32) sum += (Acc<T>)load(x[row * d + c]) * (Acc<T>)load(y[row * d + c]);
  sum = warp_sum(sum);
  if ((threadIdx.x & 31) == 0) delta[row] = sum;
}

template <typename T, int D>
__global__ void flash_backward_q(const T* __restrict__ dout, const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                 const Acc<T>* __restrict__ lse, const Acc<T>* __restrict__ delta, T* __restrict__ dq, Shape s,
                                 Acc<T> scale) {
  using A = Acc<T>;
  MM_DYNAMIC_SHARED(A, memory);
  A *Q = memory, *G = Q + TILE * (D + 1), *K = G + TILE * (D + 1), *V = K + TILE * (D + 1), *dS = V + TILE * (D + 1);
  const int64_t head = blockIdx.y, group = head / s.a * s.g + head % s.a / (s.a / s.g), first = (int64_t)blockIdx.x * TILE;
  const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  fetch<T, D>(Q, q + head * s.n * s.d, first, s.n, s.d);
  fetch<T, D>(G, dout + head * s.n * s.d, first, s.n, s.d);
  const bool real = first + r < s.n;
  const A l = real ? lse[head * s.n + first + r] : (A)0, row_delta = real ? delta[head * s.n + first + r] : (A)0;
  A sum[D / LANES] = {}, score[MINE], dp[MINE];
  for (int64_t key = 0; key < s.last_key(first); key += TILE) {
    __syncthreads();
    fetch<T, D>(K, k + group * s.m * s.d, key, s.m, s.d);
    fetch<T, D>(V, v + group * s.m * s.d, key, s.m, s.d);
    __syncthreads();
    multiply<A, D>(score, Q, K, r, lane);
    multiply<A, D>(dp, G, V, r, lane);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const bool seen = s.sees(first + r, key + lane + LANES * i);
      dS[r * (TILE + 1) + lane + LANES * i] = seen ? exp_of(score[i] * scale - l) * (dp[i] - row_delta) : (A)0;
    }
    __syncwarp();
    accumulate<A, D>(sum, dS, K, r, lane);
  }
  put<T, D>(dq + head * s.n * s.d, sum, scale, first + r, s.n, s.d, lane);
}

// Rows of a thread are keys here: score[i] is that of key r and query lane + 4 i.
template <typename T, int D>
__global__ void flash_backward_kv(const T* __restrict__ dout, const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                  const Acc<T>* __restrict__ lse, const Acc<T>* __restrict__ delta, T* __restrict__ dk,
                                  T* __restrict__ dv, Shape s, Acc<T> scale) {
  using A = Acc<T>;
  MM_DYNAMIC_SHARED(A, memory);
  A *K = memory, *V = K + TILE * (D + 1), *Q = V + TILE * (D + 1), *G = Q + TILE * (D + 1), *P = G + TILE * (D + 1), *dS = P + TILE * (TILE + 1);
  const int64_t group = blockIdx.y, first = (int64_t)blockIdx.x * TILE, heads = s.a / s.g;
  const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  fetch<T, D>(K, k + group * s.m * s.d, first, s.m, s.d);
  fetch<T, D>(V, v + group * s.m * s.d, first, s.m, s.d);
  A of_k[D / LANES] = {}, of_v[D / LANES] = {}, score[MINE], dp[MINE];
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = group / s.g * s.a + group % s.g * heads + h;
    for (int64_t query = s.first_query(first); query < s.n; query += TILE) {
      __syncthreads();
      fetch<T, D>(Q, q + head * s.n * s.d, query, s.n, s.d);
      fetch<T, D>(G, dout + head * s.n * s.d, query, s.n, s.d);
      __syncthreads();
      multiply<A, D>(score, K, Q, r, lane);
      multiply<A, D>(dp, V, G, r, lane);
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        const int64_t row = query + lane + LANES * i;
        const bool seen = s.sees(row, first + r);
        const A p = seen ? exp_of(score[i] * scale - lse[head * s.n + row]) : (A)0;
        P[r * (TILE + 1) + lane + LANES * i] = p;
        dS[r * (TILE + 1) + lane + LANES * i] = seen ? p * (dp[i] - delta[head * s.n + row]) : (A)0;
      }
      __syncwarp();
      accumulate<A, D>(of_v, P, G, r, lane);
      accumulate<A, D>(of_k, dS, Q, r, lane);
    }
  }
  put<T, D>(dk + group * s.m * s.d, of_k, scale, first + r, s.m, s.d, lane);
  put<T, D>(dv + group * s.m * s.d, of_v, (A)1, first + r, s.m, s.d, lane);
}

// More than 48 KB of shared memory must be asked for.
template <typename K> int allow_shared(K kernel, int bytes) {
#ifdef MM_EMULATE
  (void)kernel, (void)bytes;
  return 0;
#else
  return bytes <= 48 * 1024 ? 0 : (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
#endif
}
inline bool bad(int64_t b, int64_t a, int64_t g, int64_t n, int64_t m, int64_t d) {
  return b < 0 || a < 1 || g < 1 || a % g || n < 0 || m < 0 || d < 1 || d > 128 || b * a > 65535;
}

template <typename T, int D>
int forward(const void* q, const void* k, const void* v, void* out, void* lse, int64_t b, Shape s, double scale, void* stream) {
  if constexpr (sizeof(T) == 2) {
    constexpr int shared = (int)sizeof(T) * 2 * KEYS * (D + 8);
    static_assert(shared <= 48 * 1024, "more must be asked for");
    return MM_LAUNCH((flash_forward_mma<T, D>), dim3((unsigned)ceil_div(s.n, QUERIES), (unsigned)(b * s.a)), MMA_THREADS, shared, stream,
                     (const T*)q, (const T*)k, (const T*)v, (T*)out, (float*)lse, s.a, s.g, s.n, s.m, s.d, s.causal,
                     s.d == D && aligned16(k, v), (float)scale);
  }
  constexpr int bytes = shared_bytes<Acc<T>, D>(3, 1);
  if (int error = allow_shared(flash_forward<T, D>, bytes)) return error;
  return MM_LAUNCH((flash_forward<T, D>), dim3((unsigned)ceil_div(s.n, TILE), (unsigned)(b * s.a)), THREADS, bytes, stream, (const T*)q,
                   (const T*)k, (const T*)v, (T*)out, (Acc<T>*)lse, s, (Acc<T>)scale);
}
template <typename T, int D>
int backward(const void* dout, const void* q, const void* k, const void* v, const void* out, const void* lse, void* delta, void* dq,
             void* dk, void* dv, int64_t b, Shape s, double scale, void* stream) {
  using A = Acc<T>;
  constexpr int of_q = shared_bytes<A, D>(4, 1), of_kv = shared_bytes<A, D>(4, 2);
  const int64_t rows = b * s.a * s.n;
  int error = allow_shared(flash_backward_q<T, D>, of_q);
  if (!error) error = allow_shared(flash_backward_kv<T, D>, of_kv);
  if (!error) error = MM_LAUNCH((row_products<T>), (unsigned)ceil_div(rows, 8), 256, 0, stream, (const T*)dout, (const T*)out, (A*)delta, rows, s.d);
  if (!error)
    error = MM_LAUNCH((flash_backward_q<T, D>), dim3((unsigned)ceil_div(s.n, TILE), (unsigned)(b * s.a)), THREADS, of_q, stream, (const T*)dout,
                      (const T*)q, (const T*)k, (const T*)v, (const A*)lse, (const A*)delta, (T*)dq, s, (A)scale);
  if (!error)
    error = MM_LAUNCH((flash_backward_kv<T, D>), dim3((unsigned)ceil_div(s.m, TILE), (unsigned)(b * s.g)), THREADS, of_kv, stream, (const T*)dout,
                      (const T*)q, (const T*)k, (const T*)v, (const A*)lse, (const A*)delta, (T*)dk, (T*)dv, s, (A)scale);
  return error;
}

// q, out [b, a, n, d], k, v [b, g, m, d], lse Acc<T> [b, a, n]; d at most 128; n, m at least 1.
MM_EXPORT mm_flash_forward(const void* q, const void* k, const void* v, void* out, void* lse, int64_t b, int64_t a, int64_t g, int64_t n,
                           int64_t m, int64_t d, double scale, int causal, int dtype, void* stream) {
  if (b == 0 || n == 0) return 0;
  if (bad(b, a, g, n, m, d) || m == 0) return MM_BAD_ARGUMENT;
  const Shape s{a, g, n, m, (int)d, causal != 0};
  return MM_BY_DTYPE(dtype, {
    if (d <= 32) return forward<T, 32>(q, k, v, out, lse, b, s, scale, stream);
    return d <= 64 ? forward<T, 64>(q, k, v, out, lse, b, s, scale, stream) : forward<T, 128>(q, k, v, out, lse, b, s, scale, stream);
  });
}

// delta: room for Acc<T> [b, a, n]; dq, dk, dv like q, k, v.
MM_EXPORT mm_flash_backward(const void* dout, const void* q, const void* k, const void* v, const void* out, const void* lse, void* delta,
                            void* dq, void* dk, void* dv, int64_t b, int64_t a, int64_t g, int64_t n, int64_t m, int64_t d, double scale,
                            int causal, int dtype, void* stream) {
  if (b == 0 || n == 0) return 0;
  if (bad(b, a, g, n, m, d) || m == 0) return MM_BAD_ARGUMENT;
  const Shape s{a, g, n, m, (int)d, causal != 0};
  return MM_BY_DTYPE(dtype, {
    if (d <= 32) return backward<T, 32>(dout, q, k, v, out, lse, delta, dq, dk, dv, b, s, scale, stream);
    if (d <= 64) return backward<T, 64>(dout, q, k, v, out, lse, delta, dq, dk, dv, b, s, scale, stream);
    return backward<T, 128>(dout, q, k, v, out, lse, delta, dq, dk, dv, b, s, scale, stream);
  });
}
