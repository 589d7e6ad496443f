// RMSNorm and LayerNorm, forward and backward, with the residual addition before them.
//
//   h = x + r                                                (without a residual h = x, and nothing is stored)
//   y = (h - mean) rstd gamma + beta      LayerNorm          y = h rstd gamma      RMSNorm
//   g = dy gamma, n = (h - mean) rstd:    dh = rstd (g - avg(g) - n avg(g n)) + ds     (avg(g) in LayerNorm only; ds is
//                                         the gradient that reaches h by the residual stream)
//                                         dgamma = sum over rows of dy n,    dbeta = sum over rows of dy
//
// The ladder, and what bounds each step:
//   0  a thread a row                     latency: neighbours read addresses a row apart, 1 of 32 bytes is used
//   1  a block a row, strided threads     instructions: 2 bytes a load, and the row is read twice
//   2  16 bytes a load (Pack)             memory, but the second reading comes from the L2
//   3  the row stays in registers (PER)   memory: every byte moves once. This is the forward pass
//   4  backward, a block a row: dgamma wants a sum over rows; atomics collide, a [rows, cols] buffer doubles the traffic
//   5  backward, a few blocks for all rows: a thread keeps its columns' dgamma in registers from row to row, writes it
//      once, and `column_sums` adds the few partial rows. Memory again, if enough loads are on their way: as many blocks
//      as the multiprocessors hold at once (5 of 128 threads at 2048 columns in bf16). This is the backward pass
// Bound reached by design: forward 2 bytes a value in, 2 out (4 in, 4 out with the residual); backward 4 in, 2 out.
//
// Rows that do not fit in the registers of a block, that are not a multiple of 16 bytes or not aligned to it, take the
// same code with PER = 0 or VEC = 1. Statistics are in Acc<T>; the variance is the mean of squared *differences*.
#include "device.h"

// The row that a block works on: in registers (PER packs a thread), or read again each time.
template <typename T, int VEC, int PER, bool LAYER, bool RESIDUAL>
__global__ void __launch_bounds__(512, 1) norm_forward(const T* __restrict__ x, const T* __restrict__ r, const T* __restrict__ gamma,
                             const T* __restrict__ beta, T* __restrict__ h, T* __restrict__ y, Acc<T>* __restrict__ mean,
                             Acc<T>* __restrict__ rstd, int64_t cols, Acc<T> eps) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t row = blockIdx.x, at = row * cols, packs = cols / VEC;
  P kept[PER ? PER : 1];
  auto read = [&](int64_t i) {
    P p = reinterpret_cast<const P*>((RESIDUAL && PER == 0 ? h : x) + at)[i];  // in memory h replaces x after pass 1
    return p;
  };
  A sums[1] = {0};
  each_pack<PER>(packs, [&](int64_t i, int k) {
    P p = reinterpret_cast<const P*>(x + at)[i];
    if (RESIDUAL) {
      P q = reinterpret_cast<const P*>(r + at)[i];
#pragma unroll
      for (int j = 0; j < VEC; ++j) p.v[j] = store<T>(load(p.v[j]) + load(q.v[j]));
      reinterpret_cast<P*>(h + at)[i] = p;
    }
    if (PER) kept[k] = p;
#pragma unroll
    for (int j = 0; j < VEC; ++j) sums[0] += LAYER ? (A)load(p.v[j]) : (A)load(p.v[j]) * load(p.v[j]);
  });
  block_sum<1>(sums);
  A m = 0, s;
  if (LAYER) {
    m = sums[0] / cols;
    A squares[1] = {0};
    each_pack<PER>(packs, [&](int64_t i, int k) {
      P p = PER ? kept[k] : read(i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) squares[0] += (load(p.v[j]) - m) * (load(p.v[j]) - m);
    });
    block_sum<1>(squares);
    s = rsqrt_of(squares[0] / cols + eps);
  } else {
    s = rsqrt_of(sums[0] / cols + eps);
  }
  if (threadIdx.x == 0) {
    rstd[row] = s;
    if (LAYER) mean[row] = m;
  }
  each_pack<PER>(packs, [&](int64_t i, int k) {
    P p = PER ? kept[k] : read(i), w = reinterpret_cast<const P*>(gamma)[i], b, out;
    if (LAYER) b = reinterpret_cast<const P*>(beta)[i];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      A n = (load(p.v[j]) - m) * s * load(w.v[j]);
      out.v[j] = store<T>(LAYER ? n + load(b.v[j]) : n);
    }
    reinterpret_cast<P*>(y + at)[i] = out;
  });
}

// A block takes rows blockIdx.x, + gridDim.x, ...; its part of dgamma and dbeta is row blockIdx.x of the partial sums.
template <typename T, int VEC, int PER, bool LAYER>
__global__ void __launch_bounds__(512, 1) norm_backward(const T* __restrict__ dy, const T* __restrict__ ds, const T* __restrict__ h,
                              const T* __restrict__ gamma, const Acc<T>* __restrict__ mean, const Acc<T>* __restrict__ rstd,
                              T* __restrict__ dh, Acc<T>* __restrict__ dgamma, Acc<T>* __restrict__ dbeta, int64_t rows,
                              int64_t cols) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  constexpr int HELD = PER ? PER : 1;
  const int64_t packs = cols / VEC;
  dgamma += blockIdx.x * cols;
  dbeta += LAYER ? blockIdx.x * cols : 0;
  A of_gamma[HELD * VEC] = {}, of_beta[LAYER ? HELD * VEC : 1] = {};
  P held_dy[HELD], held_h[HELD];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t at = row * cols;
    const A s = rstd[row], m = LAYER ? mean[row] : (A)0;
    A sums[2] = {0, 0};
    each_pack<PER>(packs, [&](int64_t i, int k) {
      P p = reinterpret_cast<const P*>(h + at)[i], d = reinterpret_cast<const P*>(dy + at)[i];
      P w = reinterpret_cast<const P*>(gamma)[i];
      if (PER) held_h[k] = p, held_dy[k] = d;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        A n = (load(p.v[j]) - m) * s, dv = load(d.v[j]), g = dv * load(w.v[j]);
        sums[0] += g * n;
        sums[1] += g;
        if (PER) {
          of_gamma[k * VEC + j] += dv * n;
          if (LAYER) of_beta[k * VEC + j] += dv;
        } else {  // in memory, but the column is this thread's alone
          int64_t c = i * VEC + j;
          dgamma[c] = (row == blockIdx.x ? (A)0 : dgamma[c]) + dv * n;
          if (LAYER) dbeta[c] = (row == blockIdx.x ? (A)0 : dbeta[c]) + dv;
        }
      }
    });
    block_sum<2>(sums);
    const A projection = sums[0] / cols, average = LAYER ? sums[1] / cols : (A)0;
    each_pack<PER>(packs, [&](int64_t i, int k) {
      P p = PER ? held_h[k] : reinterpret_cast<const P*>(h + at)[i], d = PER ? held_dy[k] : reinterpret_cast<const P*>(dy + at)[i];
      P w = reinterpret_cast<const P*>(gamma)[i], stream, out;
      if (ds) stream = reinterpret_cast<const P*>(ds + at)[i];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        A n = (load(p.v[j]) - m) * s, g = load(d.v[j]) * load(w.v[j]), v = s * (g - average - n * projection);
        out.v[j] = store<T>(ds ? v + load(stream.v[j]) : v);
      }
      reinterpret_cast<P*>(dh + at)[i] = out;
    });
  }
  if (PER)
    each_pack<PER>(packs, [&](int64_t i, int k) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        dgamma[i * VEC + j] = of_gamma[k * VEC + j];
        if (LAYER) dbeta[i * VEC + j] = of_beta[k * VEC + j];
      }
    });
}

// How a row is cut over a block: two packs a thread while that fits. A multiprocessor has 65536 registers, so a block of
// 1024 threads may use 64 a thread; these hold more, and get 512 threads at most (__launch_bounds__ tells the compiler;
// a launch that wants more registers than there are fails on a GPU and nowhere else).
constexpr int MOST = 512;
struct Cut { int threads; bool in_registers; };
inline Cut cut_row(int64_t packs) {
  int threads = threads_for(ceil_div(packs, 2), MOST);
  return {threads, packs <= 2 * (int64_t)threads};
}

template <typename T, bool LAYER, bool RESIDUAL>
int forward(const void* x, const void* r, const void* gamma, const void* beta, void* h, void* y, void* mean, void* rstd,
            int64_t rows, int64_t cols, double eps, void* stream) {
  constexpr int VEC = vector_width<T>();
#define MM_FORWARD(VEC, PER, threads)                                                                             \
  MM_LAUNCH((norm_forward<T, VEC, PER, LAYER, RESIDUAL>), (unsigned)rows, threads, 0, stream, (const T*)x, (const T*)r, \
            (const T*)gamma, (const T*)beta, (T*)h, (T*)y, (Acc<T>*)mean, (Acc<T>*)rstd, cols, (Acc<T>)eps)
  if (cols % VEC || !aligned16(x, r, gamma, beta, h, y)) return MM_FORWARD(1, 0, threads_for(cols, MOST));
  Cut cut = cut_row(cols / VEC);
  return cut.in_registers ? MM_FORWARD(VEC, 2, cut.threads) : MM_FORWARD(VEC, 0, MOST);
}

template <typename T, bool LAYER>
int backward(const void* dy, const void* ds, const void* h, const void* gamma, const void* mean, const void* rstd, void* dh,
             void* partial, void* dgamma, void* dbeta, int64_t rows, int64_t cols, int64_t parts, void* stream) {
  constexpr int VEC = vector_width<T>();
  Acc<T>*pg = (Acc<T>*)partial, *pb = pg + parts * cols;
#define MM_BACKWARD(VEC, PER, threads)                                                                                \
  MM_LAUNCH((norm_backward<T, VEC, PER, LAYER>), (unsigned)parts, threads, 0, stream, (const T*)dy, (const T*)ds, (const T*)h, \
            (const T*)gamma, (const Acc<T>*)mean, (const Acc<T>*)rstd, (T*)dh, pg, pb, rows, cols)
  int error;
  if (cols % VEC || !aligned16(dy, ds, h, gamma, dh)) {
    error = MM_BACKWARD(1, 0, threads_for(cols, MOST));
  } else {
    Cut cut = cut_row(cols / VEC);
    error = cut.in_registers ? MM_BACKWARD(VEC, 2, cut.threads) : MM_BACKWARD(VEC, 0, MOST);
  }
  if (!error) error = launch_column_sums<T>(pg, dgamma, parts, cols, stream);
  if (!error && LAYER) error = launch_column_sums<T>(pb, dbeta, parts, cols, stream);
  return error;
}

template <typename T, bool LAYER> int resident(int* blocks, int64_t cols) {
  constexpr int VEC = vector_width<T>();
  Cut cut = cut_row(ceil_div(cols, VEC));
  return cut.in_registers ? MM_RESIDENT(*blocks, (norm_backward<T, VEC, 2, LAYER>), cut.threads)
                          : MM_RESIDENT(*blocks, (norm_backward<T, VEC, 0, LAYER>), MOST);
}

// x, r, h, y [rows, cols]; gamma, beta [cols]; mean, rstd [rows] in Acc<T>. beta null: RMSNorm. r null: no residual.
MM_EXPORT mm_norm_forward(const void* x, const void* r, const void* gamma, const void* beta, void* h, void* y, void* mean,
                          void* rstd, int64_t rows, int64_t cols, double eps, int dtype, void* stream) {
  if (rows == 0 || cols == 0) return 0;
  if (rows < 0 || cols < 0 || rows > 0x7fffffff || (r && !h)) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    if (beta && r) return forward<T, true, true>(x, r, gamma, beta, h, y, mean, rstd, rows, cols, eps, stream);
    if (beta) return forward<T, true, false>(x, r, gamma, beta, h, y, mean, rstd, rows, cols, eps, stream);
    if (r) return forward<T, false, true>(x, r, gamma, beta, h, y, mean, rstd, rows, cols, eps, stream);
    return forward<T, false, false>(x, r, gamma, beta, h, y, mean, rstd, rows, cols, eps, stream);
  });
}

// dy, ds, h, dh [rows, cols]; ds may be null. mean null: RMSNorm. partial: Acc<T> [2, parts, cols], 1 <= parts <= rows.
MM_EXPORT mm_norm_backward(const void* dy, const void* ds, const void* h, const void* gamma, const void* mean,
                           const void* rstd, void* dh, void* partial, void* dgamma, void* dbeta, int64_t rows, int64_t cols,
                           int64_t parts, int dtype, void* stream) {
  if (cols == 0) return 0;
  if (rows <= 0 || cols < 0 || parts < 1 || parts > rows) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    if (mean) return backward<T, true>(dy, ds, h, gamma, mean, rstd, dh, partial, dgamma, dbeta, rows, cols, parts, stream);
    return backward<T, false>(dy, ds, h, gamma, mean, rstd, dh, partial, dgamma, dbeta, rows, cols, parts, stream);
  });
}

// How many blocks of the backward pass a multiprocessor holds at once; into `blocks`, an int32 of the host.
MM_EXPORT mm_norm_backward_resident(void* blocks, int64_t cols, int centred, int dtype, void* stream) {
  if (!blocks || cols < 1) return MM_BAD_ARGUMENT;
  (void)stream;
  return MM_BY_DTYPE(dtype, { return centred ? resident<T, true>((int*)blocks, cols) : resident<T, false>((int*)blocks, cols); });
}
