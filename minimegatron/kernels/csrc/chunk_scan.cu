// Mamba-2 within chunks of l tokens: attention without a softmax, whose weights fade, forward and backward.
//
//   y_i = sum_{j <= i} w_ij x_j          w_ij = exp(a_i - a_j) s_ij          s = C B^T, shared by the heads of a group
//
//   dx_j = sum_{i >= j} w_ij dy_i        ds_ij = sum over heads of exp(a_i - a_j) dy_i . x_j
//
// a falls from token to token, so no exponential is larger than 1. With documents a token reads those of its own alone.
// The gradient of a needs no kernel: w_ij moves with a_i and against a_j, so da_i = dy_i . y_i - x_i . dx_i.
//
// The ladder, and what bounds each step:
//   0  torch: differences, exp, mask, product, matmul     memory: five arrays of [l, l] a head, written and read
//   1  weights made where they are used, 32 x 32 at once  the exponentials, and products outside of tensor cores
// Bound reached by design: memory holds s, which a group shares, and no array of [l, l] a head.
#include "device.h"

constexpr int TILE = 32, LINES = 8;  // a block computes a tile, each of its 32 x 8 threads four rows of a column

struct Chunks {
  int l, heads, groups, p;
  const int64_t* documents;  // [m, l] or null
  __device__ bool seen(int64_t m, int later, int earlier) const {
    if (later >= l || earlier > later) return false;
    return !documents || documents[m * l + later] == documents[m * l + earlier];
  }
};

// out_i = sum_j w_ij in_j of one head, or with BACK out_j = sum_i w_ij in_i.
template <typename T, bool BACK>
__global__ void __launch_bounds__(256, 4) weighted_rows(const T* __restrict__ scores, const T* __restrict__ a, const T* __restrict__ in, T* __restrict__ out, Chunks c) {
  using A = Acc<T>;
  MM_SHARED(A, w, TILE * (TILE + 1));  // [row of out, row of in]
  MM_SHARED(A, v, TILE * TILE);        // [row of in, channel]
  const int64_t m = blockIdx.x / c.heads;
  const int head = blockIdx.x % c.heads, x = threadIdx.x, row = blockIdx.y * TILE, channel = blockIdx.z * TILE + x;
  const T* logs = a + (int64_t)blockIdx.x * c.l;
  const T* s = scores + (m * c.groups + head / (c.heads / c.groups)) * c.l * c.l;
  A sum[TILE / LINES] = {};
  for (int other = BACK ? row : 0; other < (BACK ? c.l : row + 1); other += TILE) {
    for (int y = threadIdx.y; y < TILE; y += LINES) {
      const int later = (BACK ? other : row) + y, earlier = (BACK ? row : other) + x, from = other + y;
      A one = 0;
      if (c.seen(m, later, earlier)) one = exp_of(load(logs[later]) - load(logs[earlier])) * load(s[(int64_t)later * c.l + earlier]);
      w[BACK ? x * (TILE + 1) + y : y * (TILE + 1) + x] = one;
      v[y * TILE + x] = from < c.l && channel < c.p ? load(in[((m * c.l + from) * c.heads + head) * c.p + channel]) : (A)0;
    }
    __syncthreads();
    for (int k = 0; k < TILE; ++k) {
      const A value = v[k * TILE + x];
#pragma unroll
      for (int i = 0; i < TILE / LINES; ++i) sum[i] += w[(threadIdx.y + i * LINES) * (TILE + 1) + k] * value;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TILE / LINES; ++i) {
    const int at = row + threadIdx.y + i * LINES;
    if (at < c.l && channel < c.p) out[((m * c.l + at) * c.heads + head) * c.p + channel] = store<T>(sum[i]);
  }
}

// ds_ij of one group
template <typename T>
__global__ void __launch_bounds__(256, 4) score_gradients(const T* __restrict__ dy, const T* __restrict__ in, const T* __restrict__ a, T* __restrict__ ds, Chunks c) {
  using A = Acc<T>;
  MM_SHARED(A, u, TILE * (TILE + 1));  // [i, channel] of dy
  MM_SHARED(A, v, TILE * (TILE + 1));  // [j, channel] of x
  const int64_t m = blockIdx.x / c.groups;
  const int group = blockIdx.x % c.groups, each = c.heads / c.groups, x = threadIdx.x;
  const int row = blockIdx.y * TILE, column = blockIdx.z * TILE;
  A sum[TILE / LINES] = {};
  for (int head = group * each; column <= row && head < (group + 1) * each; ++head) {
    A dot[TILE / LINES] = {};
    for (int channel = x; channel - x < c.p; channel += TILE) {
      for (int y = threadIdx.y; y < TILE; y += LINES) {
        const bool inside = channel < c.p;
        const int i = row + y, j = column + y;
        u[y * (TILE + 1) + x] = inside && i < c.l ? load(dy[((m * c.l + i) * c.heads + head) * c.p + channel]) : (A)0;
        v[y * (TILE + 1) + x] = inside && j < c.l ? load(in[((m * c.l + j) * c.heads + head) * c.p + channel]) : (A)0;
      }
      __syncthreads();
      for (int k = 0; k < TILE; ++k) {
        const A value = v[x * (TILE + 1) + k];
#pragma unroll
        for (int i = 0; i < TILE / LINES; ++i) dot[i] += u[(threadIdx.y + i * LINES) * (TILE + 1) + k] * value;
      }
      __syncthreads();
    }
    const T* logs = a + (m * c.heads + head) * c.l;
#pragma unroll
    for (int i = 0; i < TILE / LINES; ++i) {
      const int later = row + threadIdx.y + i * LINES, earlier = column + x;
      if (c.seen(m, later, earlier)) sum[i] += exp_of(load(logs[later]) - load(logs[earlier])) * dot[i];
    }
  }
#pragma unroll
  for (int i = 0; i < TILE / LINES; ++i) {
    const int later = row + threadIdx.y + i * LINES, earlier = column + x;
    if (later < c.l && earlier < c.l) ds[((int64_t)blockIdx.x * c.l + later) * c.l + earlier] = store<T>(sum[i]);
  }
}

inline bool fits(int64_t m, int64_t l, int64_t heads, int64_t groups, int64_t p) {
  return m > 0 && l > 0 && l <= 65535 * TILE && groups > 0 && heads > 0 && heads % groups == 0 && p > 0 && p <= 65535 * TILE && m * heads <= 0x7fffffff;
}

// scores [m, groups, l, l], a [m, heads, l], in and out [m, l, heads, p], documents int64 [m, l] or null; back: by the
// transposed weights
MM_EXPORT mm_chunk_scan(const void* scores, const void* a, const void* in, const void* documents, void* out, int64_t m, int64_t l,
                        int64_t heads, int64_t groups, int64_t p, int back, int dtype, void* stream) {
  if (!fits(m, l, heads, groups, p)) return MM_BAD_ARGUMENT;
  const Chunks c{(int)l, (int)heads, (int)groups, (int)p, (const int64_t*)documents};
  const dim3 grid((unsigned)(m * heads), (unsigned)ceil_div(l, TILE), (unsigned)ceil_div(p, TILE)), block(TILE, LINES);
  return MM_BY_DTYPE(dtype, {
    if (back) return MM_LAUNCH((weighted_rows<T, true>), grid, block, 0, stream, (const T*)scores, (const T*)a, (const T*)in, (T*)out, c);
    return MM_LAUNCH((weighted_rows<T, false>), grid, block, 0, stream, (const T*)scores, (const T*)a, (const T*)in, (T*)out, c);
  });
}

// dy and in [m, l, heads, p] -> ds [m, groups, l, l], zeros above the diagonal
MM_EXPORT mm_chunk_scan_scores(const void* dy, const void* in, const void* a, const void* documents, void* ds, int64_t m, int64_t l,
                               int64_t heads, int64_t groups, int64_t p, int dtype, void* stream) {
  if (!fits(m, l, heads, groups, p)) return MM_BAD_ARGUMENT;
  const Chunks c{(int)l, (int)heads, (int)groups, (int)p, (const int64_t*)documents};
  const unsigned tiles = (unsigned)ceil_div(l, TILE);
  return MM_BY_DTYPE(dtype, {
    return MM_LAUNCH((score_gradients<T>), dim3((unsigned)(m * groups), tiles, tiles), dim3(TILE, LINES), 0, stream, (const T*)dy, (const T*)in, (const T*)a, (T*)ds, c);
  });
}
