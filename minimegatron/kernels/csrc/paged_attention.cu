// Paged attention on a GPU: a few new tokens of each sequence attend to all of its tokens, read in place
// (paged_attention.cpp is the same on a CPU). A block has one new token, at most 8 heads of a group, a range of the keys:
//
//   tile after tile of 32 keys:  s = scale q . k,  m' = max(m, max s),  p = exp(s - m'),
//                                l = l exp(m - m') + sum p,  o = o exp(m - m') + sum p v
//   then over the ranges i of a token:  out = sum_i exp(m_i - m) o_i / sum_i exp(m_i - m) l_i
//
// The ladder, and what bounds each step:
//   0  torch: pages gathered and padded              memory traffic, three times: read, written, read again
//   1  a block for each token and head               memory traffic, once a head: heads of a group read the same keys
//   2  eight heads of a group in a block             memory traffic, once, with enough tokens to fill the GPU
//   3  ranges of keys in blocks of their own         the same with few long sequences ("flash decoding")
// Bound reached by design: 2 g (d + d_v) / 2 bytes of 16 bits for each key, at 1 to 8 multiply-adds a number. Tensor
// cores would serve more heads a group (latents: 128 heads, 16 passes here); flash-attn and FlashMLA have them.
#include "device.h"

constexpr int THREADS = 128, TILE = 32, HEADS = 8, LANES = 8;  // keys of a tile; heads of a block; threads of a dot product

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

struct Places {  // where the tokens of each sequence are
  const int *starts, *lengths, *table;
  int sequences, most, longest, page_size, heads, groups, d, dv, window, splits, range;
  int64_t keys[3], values[3];  // strides of (page, row, head)

  struct Span { int sequence, first, last; };
  // The keys [first, last) that the token in this row sees; none if its sequence has more than `longest` new tokens.
  __device__ Span seen(int64_t row) const {
    int low = 0, high = sequences;  // starts[low] <= row < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= row) low = middle; else high = middle;
    }
    const int queries = starts[low + 1] - starts[low], last = lengths[low] - queries + (int)row - starts[low] + 1;
    if (queries > longest) return {low, 0, 0};
    return {low, window > 0 && last > window ? last - window : 0, last};
  }
};

template <typename T, int VEC, int PER>
__global__ void __launch_bounds__(THREADS, 4) attend_range(const T* __restrict__ q, const T* __restrict__ keys, const T* __restrict__ values,
                                                        T* __restrict__ out, Acc<T>* __restrict__ partial, Acc<T>* __restrict__ stats,
                                                        Places p, Acc<T> scale, Acc<T> softcap, const T* __restrict__ sinks) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  MM_DYNAMIC_SHARED(A, Q);  // [HEADS, d]
  MM_SHARED(A, W, HEADS * TILE);
  MM_SHARED(A, top, HEADS);
  MM_SHARED(A, mass, HEADS);
  MM_SHARED(A, fade, HEADS);
  MM_SHARED(int64_t, key_at, TILE);
  MM_SHARED(int64_t, value_at, TILE);
  const int shared = p.heads / p.groups, passes = (shared + HEADS - 1) / HEADS;
  const int group = blockIdx.y / passes, h0 = blockIdx.y % passes * HEADS, count = shared - h0 < HEADS ? shared - h0 : HEADS;
  const int64_t row = blockIdx.x, head = row * p.heads + group * shared + h0;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / 32;
  const Places::Span seen = p.seen(row);
  if (seen.last == 0) return;
  const int begin = seen.first > (int)blockIdx.z * p.range ? seen.first : (int)blockIdx.z * p.range, end = least(seen.last, ((int)blockIdx.z + 1) * p.range);
  for (int i = threadIdx.x; i < HEADS * p.d; i += THREADS) Q[i] = i < count * p.d ? (A)load(q[head * p.d + i]) * scale : (A)0;
  if (threadIdx.x < HEADS) {  // the first range has the sink, a key whose value is 0
    const bool has = sinks && blockIdx.z == 0 && (int)threadIdx.x < count;
    top[threadIdx.x] = has ? (A)load(sinks[group * shared + h0 + threadIdx.x]) : -infinity<A>(), mass[threadIdx.x] = has ? 1 : 0;
  }
  A sum[HEADS][PER] = {};

  for (int tile = begin; tile < end; tile += TILE) {
    __syncthreads();  // Q is written, and all threads have read the last tile
    if (threadIdx.x < TILE && tile + (int)threadIdx.x < end) {
      const int j = tile + threadIdx.x;
      const int64_t page = p.table[(int64_t)seen.sequence * p.most + j / p.page_size], at = j % p.page_size;
      key_at[threadIdx.x] = page * p.keys[0] + at * p.keys[1] + group * p.keys[2];
      value_at[threadIdx.x] = page * p.values[0] + at * p.values[1] + group * p.values[2];
    }
    __syncthreads();
#pragma unroll
    for (int k = threadIdx.x / LANES; k < TILE; k += THREADS / LANES) {
      A dots[HEADS] = {};
      if (tile + k < end) {
        const P* key = reinterpret_cast<const P*>(keys + key_at[k]);
        for (int c = lane; c < p.d / VEC; c += LANES) {
          const P x = key[c];
#pragma unroll
          for (int e = 0; e < VEC; ++e) {
            const A y = load(x.v[e]);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) dots[h] += Q[h * p.d + c * VEC + e] * y;
          }
        }
      }
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        A dot = dots[h];
#pragma unroll
        for (int o = 1; o < LANES; o *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, o);
        if (softcap > 0) dot = softcap * tanh_of(dot / softcap);
        if (lane == h) W[h * TILE + k] = tile + k < end ? dot : -infinity<A>();
      }
    }
    __syncthreads();
    for (int h = warp; h < HEADS; h += THREADS / 32) {
      const int k = threadIdx.x % 32;
      const A score = W[h * TILE + k], best = warp_max(score), before = top[h];
      const A now = best > before || best != best ? best : before, e = exp_of(score - now), all = warp_sum(e);
      W[h * TILE + k] = e;
      if (k == 0) {
        fade[h] = exp_of(before - now);
        mass[h] = mass[h] * fade[h] + all;
        top[h] = now;
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
#pragma unroll
      for (int i = 0; i < PER; ++i) sum[h][i] *= fade[h];
    for (int k = 0; k < least(TILE, end - tile); ++k) {
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const int c = threadIdx.x + i * THREADS;
        const A x = c < p.dv ? (A)load(values[value_at[k] + c]) : (A)0;
#pragma unroll
        for (int h = 0; h < HEADS; ++h) sum[h][i] += W[h * TILE + k] * x;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h >= count) break;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int c = threadIdx.x + i * THREADS;
      if (c >= p.dv) continue;
      if (p.splits == 1) out[(head + h) * p.dv + c] = store<T>(sum[h][i] / mass[h]);
      else partial[((head + h) * p.splits + blockIdx.z) * p.dv + c] = sum[h][i];
    }
    if (p.splits > 1 && threadIdx.x == 0) {
      stats[((head + h) * p.splits + blockIdx.z) * 2] = top[h];
      stats[((head + h) * p.splits + blockIdx.z) * 2 + 1] = mass[h];
    }
  }
}

// Combine the ranges of a token and head; a range without a key has m = -inf and l = 0.
template <typename T>
__global__ void __launch_bounds__(THREADS) join_ranges(const Acc<T>* __restrict__ partial, const Acc<T>* __restrict__ stats, T* __restrict__ out, Places p) {
  using A = Acc<T>;
  const int64_t head = blockIdx.x;
  if (p.seen(head / p.heads).last == 0) return;
  const A* mine = stats + head * p.splits * 2;
  A top = -infinity<A>(), mass = 0;
  for (int i = 0; i < p.splits; ++i) top = mine[2 * i] > top || mine[2 * i] != mine[2 * i] ? mine[2 * i] : top;
  for (int i = 0; i < p.splits; ++i)
    if (mine[2 * i + 1] != 0) mass += exp_of(mine[2 * i] - top) * mine[2 * i + 1];
  for (int c = threadIdx.x; c < p.dv; c += THREADS) {
    A sum = 0;
    for (int i = 0; i < p.splits; ++i)
      if (mine[2 * i + 1] != 0) sum += exp_of(mine[2 * i] - top) * partial[(head * p.splits + i) * p.dv + c];
    out[head * p.dv + c] = store<T>(sum / mass);
  }
}

// nvcc cannot launch a kernel that is chosen by an expression: each is named where it is launched.
#define MM_ATTEND(WIDTH, PER)                                                                                                                 \
  MM_LAUNCH((attend_range<T, WIDTH, PER>), grid, THREADS, bytes, stream, (const T*)q, (const T*)keys, (const T*)values, (T*)out, (A*)partial, \
            (A*)stats, p, (A)scale, (A)softcap, (const T*)sinks)

// q [n, heads, d] and out [n, heads, dv] are dense; keys and values have strides of (page, row, head) in elements, and
// dense channels. Sequences with more than `longest` new tokens are left out. window 0 and softcap 0 for none; sinks [heads]
// or null. With more than one split, each of `range` keys: partial [n, heads, splits, dv] and stats [n, heads, splits, 2] are written.
MM_EXPORT mm_paged_attention(const void* q, const void* keys, const void* values, void* out, void* partial, void* stats, const void* starts,
                             const void* lengths, const void* table, int64_t n, int64_t sequences, int64_t most, int64_t longest, int64_t page_size,
                             int64_t heads, int64_t groups, int64_t d, int64_t dv, int64_t key_page, int64_t key_row, int64_t key_head,
                             int64_t value_page, int64_t value_row, int64_t value_head, double scale, int64_t window, double softcap, const void* sinks,
                             int64_t splits, int64_t range, int dtype, void* stream) {
  if (n == 0) return 0;
  if (n < 0 || n * heads > 0x7fffffff || sequences < 1 || groups < 1 || heads % groups || d < 1 || d > 640 || dv < 1 || dv > 4 * THREADS ||
      page_size < 1 || splits < 1 || range < 1 || (splits > 1 && (!partial || !stats)))
    return MM_BAD_ARGUMENT;
  const Places p{(const int*)starts, (const int*)lengths, (const int*)table, (int)sequences, (int)most, (int)longest, (int)page_size,
                 (int)heads, (int)groups, (int)d, (int)dv, (int)window, (int)splits, (int)range,
                 {key_page, key_row, key_head}, {value_page, value_row, value_head}};
  const dim3 grid((unsigned)n, (unsigned)(groups * ceil_div(heads / groups, HEADS)), (unsigned)splits);
  return MM_BY_DTYPE(dtype, {
    using A = Acc<T>;
    constexpr int VEC = vector_width<T>();
    const bool packs = d % VEC == 0 && key_page % VEC == 0 && key_row % VEC == 0 && key_head % VEC == 0 && aligned16(keys);
    const int bytes = (int)(HEADS * d * sizeof(A));
    const int error = dv <= THREADS ? (packs ? MM_ATTEND(VEC, 1) : MM_ATTEND(1, 1)) : (packs ? MM_ATTEND(VEC, 4) : MM_ATTEND(1, 4));
    if (error || splits == 1) return error;
    return MM_LAUNCH((join_ranges<T>), (unsigned)(n * heads), THREADS, 0, stream, (const A*)partial, (const A*)stats, (T*)out, p);
  });
}
