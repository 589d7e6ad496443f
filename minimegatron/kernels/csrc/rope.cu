// Rotary position embedding: pairs of channels turned by the angle of their position, forward and backward.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)       pairs (i, i + r), or (2 i, 2 i + 1) when interleaved; i < r
//   backward: the same with -sin, since the inverse of a turn is its transpose
//
// Channels from 2 r on are copied. cos and sin are [tokens, r] (or one row of them for all sequences of a batch).
//
// The ladder, and what bounds each step:
//   0  torch: slices, products, cat           memory, four times over; its bf16 version also rounds cos and sin to bf16
//   1  one kernel, a pair a thread            instructions: index arithmetic for 4 bytes of work
//   2  a block a token, 16 bytes a load of each half; cos and sin of the token come once and stay in the L1 for all heads
// Bound reached by design: memory, 2 bytes in and 2 out a channel; angles add 8 r bytes a token, 1/heads of the rest.
#include "device.h"

// x may be a view into packed queries, keys and values: strides of token and head; channels are neighbours.
template <typename T, int VEC>
__global__ void __launch_bounds__(256) rope(const T* __restrict__ x, const Acc<T>* __restrict__ cos, const Acc<T>* __restrict__ sin, T* __restrict__ y,
                     int64_t batch, int64_t heads, int64_t d, int64_t r, int64_t stride_s, int64_t stride_b, int64_t stride_h,
                     int64_t angles_batch, bool interleaved, Acc<T> sign) {
  using A = Acc<T>;
  using P = Pack<T, VEC>;
  const int64_t s = blockIdx.x / batch, b = blockIdx.x % batch;
  x += s * stride_s + b * stride_b;
  y += (int64_t)blockIdx.x * heads * d;
  const int64_t angles = (s * angles_batch + (angles_batch > 1 ? b : 0)) * r;
  const int64_t per_head = r / VEC, copied = (d - 2 * r) / VEC;
  for (int64_t item = threadIdx.x; item < heads * per_head; item += blockDim.x) {
    const int64_t head = item / per_head, i = item % per_head * VEC;
    const int64_t low = interleaved ? 2 * i : i, high = interleaved ? 2 * i + VEC : r + i;  // where two packs lie
    P p = *reinterpret_cast<const P*>(x + head * stride_h + low), q = *reinterpret_cast<const P*>(x + head * stride_h + high), o, n;
    A first[2 * VEC], turned[2 * VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) first[j] = load(p.v[j]), first[VEC + j] = load(q.v[j]);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const A c = cos[angles + i + j], t = sign * sin[angles + i + j];
      const A u = interleaved ? first[2 * j] : first[j], v = interleaved ? first[2 * j + 1] : first[VEC + j];
      const A nu = u * c - v * t, nv = v * c + u * t;
      if (interleaved) turned[2 * j] = nu, turned[2 * j + 1] = nv;
      else turned[j] = nu, turned[VEC + j] = nv;
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) o.v[j] = store<T>(turned[j]), n.v[j] = store<T>(turned[VEC + j]);
    *reinterpret_cast<P*>(y + head * d + low) = o;
    *reinterpret_cast<P*>(y + head * d + high) = n;
  }
  for (int64_t item = threadIdx.x; item < heads * copied; item += blockDim.x) {
    const int64_t head = item / copied, i = 2 * r + item % copied * VEC;
    *reinterpret_cast<P*>(y + head * d + i) = *reinterpret_cast<const P*>(x + head * stride_h + i);
  }
}

// x [s, batch, heads, d] by strides (in elements; of d it is 1), y contiguous; cos, sin Acc<T> [s, batch or 1, r].
MM_EXPORT mm_rope(const void* x, const void* cos, const void* sin, void* y, int64_t s, int64_t batch, int64_t heads, int64_t d,
                  int64_t r, int64_t stride_s, int64_t stride_b, int64_t stride_h, int64_t angles_batch, int interleaved,
                  int backward, int dtype, void* stream) {
  if (s * batch * heads * d == 0) return 0;
  if (2 * r > d || r < 0 || s * batch > 0x7fffffff || (angles_batch != 1 && angles_batch != batch)) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    const bool wide = !(d % VEC || r % VEC || stride_s % VEC || stride_b % VEC || stride_h % VEC) && aligned16(x, y);
    const int threads = threads_for(heads * (wide ? d / 2 / VEC : d / 2), 256);
    const Acc<T> sign = backward ? -1 : 1;
    if (wide) return MM_LAUNCH((rope<T, VEC>), (unsigned)(s * batch), threads, 0, stream, (const T*)x, (const Acc<T>*)cos, (const Acc<T>*)sin, (T*)y, batch, heads, d, r, stride_s, stride_b, stride_h, angles_batch, interleaved != 0, sign);
    return MM_LAUNCH((rope<T, 1>), (unsigned)(s * batch), threads, 0, stream, (const T*)x, (const Acc<T>*)cos, (const Acc<T>*)sin, (T*)y, batch, heads, d, r, stride_s, stride_b, stride_h, angles_batch, interleaved != 0, sign);
  });
}
