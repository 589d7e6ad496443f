// Casting to FP8: with one scale a tensor (cast, transposed copy and largest magnitude in one pass), or a scale a tile.
//
//   q = cast(clamp(x scale, -top, top)),     E4M3: top 448;  E5M2: top 57344;     NaN stays NaN
//
// A matrix product on the tensor cores wants both factors with the summed index last, and FP8 has no transposing load: dW
// needs x^T and dy^T. So the cast writes both copies, and notes the largest magnitude for the scale of the next step. Where the
// scale is that of this very tensor, a pass before it finds the magnitude: one number a block, of which every block of the
// cast takes the largest.
//
// The ladder, and what bounds each step:
//   0  torch: amax, multiply, clamp, cast, transpose      memory, five passes
//   1  one kernel; the transposed copy written directly   memory: neighbours write bytes a row apart, 1 of 32 is used
//   2  64 x 64 tiles through shared memory, 4 bytes a store   memory: 2 bytes in, 2 out
//   3  at most one atomic maximum a block, on the bits of a float that is not negative (they are ordered as integers; NaN is above
//      infinity, so it is not lost)
//   4  4 values a load; 1 / scale written here, and a scale that follows from magnitudes computed here: no launch of its own
// Bound reached by design: 4 bytes a value for cast and transpose. Tiles with their own scale: the tile is read twice, the
// second time from the L1. Back to bf16, for tensor cores that do not take tiles: 3 bytes a value.
#include "device.h"

__device__ __forceinline__ unsigned char to_fp8(float x, bool e5m2) {
#ifdef MM_EMULATE
  return emulator::to_fp8(x, e5m2);
#else
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
#endif
}
__device__ __forceinline__ float top_of(bool e5m2) { return e5m2 ? 57344.f : 448.f; }
// |x|, or NaN, as an integer that orders like the number
__device__ __forceinline__ int magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }
__device__ __forceinline__ int warp_max_bits(int v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const int w = __shfl_xor_sync(0xffffffffu, v, o);
    v = w > v ? w : v;
  }
  return v;
}

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
// Over a block of whole warps; every thread gets it. Once a kernel: nothing says when all have read.
__device__ __forceinline__ int block_max_bits(int v) {
  MM_SHARED(int, tops, 32);
  v = warp_max_bits(v);
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_max_bits((threadIdx.x & 31) < (blockDim.x >> 5) ? tops[threadIdx.x & 31] : 0);
}

// The largest magnitude of what each block has read, a NaN as infinity. No atomics and nothing to be zeroed before.
template <typename T, int VEC>
__global__ void __launch_bounds__(512) amax_parts(const T* __restrict__ x, float* __restrict__ parts, int64_t packs) {
  int top = 0;
#pragma unroll 4
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += (int64_t)gridDim.x * blockDim.x) {
    const Pack<T, VEC> p = reinterpret_cast<const Pack<T, VEC>*>(x)[i];
#pragma unroll
    for (int j = 0; j < VEC; ++j) top = larger(top, magnitude((float)load(p.v[j])));
  }
  top = block_max_bits(top);
  if (threadIdx.x == 0) parts[blockIdx.x] = __int_as_float(top > 0x7f800000 ? 0x7f800000 : top);
}

// aim 0: `source` is the scale. Else it holds `count` <= 256 magnitudes and the scale is aim over the largest of them, finite;
// 1 where that is 0 or not finite.
__device__ __forceinline__ float scale_of(const float* __restrict__ source, int count, float aim) {
  if (aim == 0.f) return *source;
  const int top = block_max_bits((int)threadIdx.x < count ? magnitude(source[threadIdx.x]) : 0);
  if (top == 0 || top >= 0x7f800000) return 1.f;
  const float s = aim / __int_as_float(top);
  return s > 3.402823466e38f ? 3.402823466e38f : s;
}

template <typename T>
__global__ void __launch_bounds__(256) cast_transpose(const T* __restrict__ x, const float* __restrict__ source, int count, float aim,
                               unsigned char* __restrict__ q, unsigned char* __restrict__ qt, int* __restrict__ amax,
                               float* __restrict__ inverse, int64_t m, int64_t n, bool packs, bool e5m2) {
  MM_SHARED(unsigned char, tile, 64 * 68);
  const int64_t r0 = (int64_t)blockIdx.y * 64, c0 = (int64_t)blockIdx.x * 64;
  const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  const float s = scale_of(source, count, aim);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *inverse = 1.f / s;
  int top = 0;
  for (int r = ty; r < 64; r += 16) {
    unsigned char four[4];
    const int64_t row = r0 + r, col = c0 + 4 * tx;
    const bool whole = packs && row < m && col + 3 < n;
    Pack<T, 4> p;
    if (whole) p = *reinterpret_cast<const Pack<T, 4>*>(x + row * n + col);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float v = whole ? (float)load(p.v[j]) : row < m && col + j < n ? (float)load(x[row * n + col + j]) : 0.f;
      top = larger(top, magnitude(v));
      four[j] = to_fp8(v * s, e5m2);
      tile[r * 68 + 4 * tx + j] = four[j];
    }
    if (row < m && col + 3 < n && n % 4 == 0) {
      *reinterpret_cast<Pack<unsigned char, 4>*>(q + row * n + col) = {four[0], four[1], four[2], four[3]};
    } else if (row < m) {
      for (int j = 0; j < 4 && col + j < n; ++j) q[row * n + col + j] = four[j];
    }
  }
  if (amax) {
    top = block_max_bits(top);
    if (threadIdx.x == 0 && top > *(volatile int*)amax) atomicMax(amax, top);  // it only grows: an old value asks too often
  }
  if (!qt) return;
  __syncthreads();
  for (int c = ty; c < 64; c += 16) {
    const int64_t row = r0 + 4 * tx, col = c0 + c;
    if (col >= n) continue;
    if (row + 3 < m && m % 4 == 0) {
      Pack<unsigned char, 4> p;
#pragma unroll
      for (int j = 0; j < 4; ++j) p.v[j] = tile[(4 * tx + j) * 68 + c];
      *reinterpret_cast<Pack<unsigned char, 4>*>(qt + col * m + row) = p;
    } else {
      for (int j = 0; j < 4 && row + j < m; ++j) qt[col * m + row + j] = tile[(4 * tx + j) * 68 + c];
    }
  }
}

// What a tile with this largest magnitude is divided by. rule 0: amax / top; 1: the same rounded up to a power of two; 2: MX,
// 2^(floor(log2 amax) - emax), which lets values up to 1.75 of the top saturate (OCP Microscaling 1.0). 1 where amax is 0 or
// not finite.
__device__ __forceinline__ float tile_scale(int bits, int rule, bool e5m2) {
  if (bits == 0 || bits >= 0x7f800000) return 1.f;
  const float amax = __int_as_float(bits);
  const int floor_log2 = bits >= 0x00800000 ? (bits >> 23) - 127 : -127;
  int e = floor_log2 - (e5m2 ? 15 : 8);
  if (rule == 0) {
    const float s = amax / top_of(e5m2);
    return s < 1.17549435e-38f ? 1.17549435e-38f : s;
  }
  if (rule == 1 && (bits & 0x7fffff) > 0x600000) ++e;  // above 1.75 2^k: both tops are 1.75 2^emax
  e = e < -126 ? -126 : e > 127 ? 127 : e;
  return __int_as_float((e + 127) << 23);
}

// A block a tile of bm x bn; scales [ceil(m / bm), ceil(n / bn)] are what q must be multiplied with.
template <typename T>
__global__ void __launch_bounds__(256) cast_tiles(const T* __restrict__ x, unsigned char* __restrict__ q, float* __restrict__ scales, int64_t m, int64_t n,
                           int bm, int bn, int rule, bool tall, bool e5m2) {
  const int64_t tiles = (n + bn - 1) / bn, tr = blockIdx.x / tiles, tc = blockIdx.x % tiles;
  int top = 0;
  for (int i = threadIdx.x; i < bm * bn; i += blockDim.x) {
    const int64_t row = tr * bm + i / bn, col = tc * bn + i % bn;
    top = larger(top, row < m && col < n ? magnitude((float)load(x[row * n + col])) : 0);
  }
  top = tall ? block_max_bits(top) : warp_max_bits(top);  // tall: more than one warp
  const float s = tile_scale(top, rule, e5m2);
  if (threadIdx.x == 0) scales[blockIdx.x] = s;
  for (int i = threadIdx.x; i < bm * bn; i += blockDim.x) {
    const int64_t row = tr * bm + i / bn, col = tc * bn + i % bn;
    if (row < m && col < n) q[row * n + col] = to_fp8((float)load(x[row * n + col]) / s, e5m2);
  }
}

// An FP8 number: E5M2 is the upper half of an fp16, E4M3 but for its NaN 2^8 times one.
__device__ __forceinline__ float from_fp8(unsigned char v, bool e5m2) {
  const unsigned short bits = e5m2 ? v << 8 : (v & 0x80) << 8 | (v & 0x7f) << 7;
#ifdef MM_EMULATE
  const float x = load(__half{bits});
#else
  const float x = load(__ushort_as_half(bits));
#endif
  return e5m2 ? x : (v & 0x7f) == 0x7f ? __int_as_float(0x7fffffff) : 256.f * x;
}

// Each thread VEC neighbours, which have one scale.
template <int VEC>
__global__ void __launch_bounds__(256) spread_tiles(const unsigned char* __restrict__ q, const float* __restrict__ scales, __nv_bfloat16* __restrict__ out,
                             int64_t packs, int64_t n, int bm, int bn, bool e5m2) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const int64_t row = i * VEC / n, col = i * VEC % n;
  const float s = scales[row / bm * ((n + bn - 1) / bn) + col / bn];
  const Pack<unsigned char, VEC> p = reinterpret_cast<const Pack<unsigned char, VEC>*>(q)[i];
  Pack<__nv_bfloat16, VEC> to;
#pragma unroll
  for (int j = 0; j < VEC; ++j) to.v[j] = store<__nv_bfloat16>(from_fp8(p.v[j], e5m2) * s);
  reinterpret_cast<Pack<__nv_bfloat16, VEC>*>(out)[i] = to;
}

// x of `size` numbers -> parts [blocks], fp32: the largest magnitude of each block's share.
MM_EXPORT mm_fp8_amax(const void* x, void* parts, int64_t size, int blocks, int dtype, void* stream) {
  if (size < 1 || blocks < 1) return MM_BAD_ARGUMENT;
  return MM_BY_DTYPE(dtype, {
    constexpr int VEC = vector_width<T>();
    if (size % VEC == 0 && aligned16(x)) return MM_LAUNCH((amax_parts<T, VEC>), (unsigned)blocks, 512, 0, stream, (const T*)x, (float*)parts, size / VEC);
    return MM_LAUNCH((amax_parts<T, 1>), (unsigned)blocks, 512, 0, stream, (const T*)x, (float*)parts, size);
  });
}

// x [m, n] -> q [m, n], qt [n, m] (or null) and inverse, an fp32 scalar: 1 / scale. source: see scale_of. amax, fp32 and not
// negative (or null), becomes the larger of itself and x's largest magnitude.
MM_EXPORT mm_fp8_cast(const void* x, const void* source, int count, double aim, void* q, void* qt, void* amax, void* inverse, int64_t m, int64_t n,
                      int e5m2, int dtype, void* stream) {
  if (m < 0 || n < 0 || ceil_div(m, 64) > 65535 || count < 1 || count > 256 || (aim != 0 && amax)) return MM_BAD_ARGUMENT;
  const dim3 grid((unsigned)(n > 0 ? ceil_div(n, 64) : 1), (unsigned)(m > 0 ? ceil_div(m, 64) : 1));  // of an empty matrix the inverse
  return MM_BY_DTYPE(dtype, {
    const bool packs = n % 4 == 0 && (uintptr_t)x % (4 * sizeof(T)) == 0;
    return MM_LAUNCH((cast_transpose<T>), grid, 256, 0, stream, (const T*)x, (const float*)source, count, (float)aim, (unsigned char*)q, (unsigned char*)qt, (int*)amax, (float*)inverse, m, n, packs, e5m2 != 0);
  });
}

// x [m, n] -> q [m, n], scales fp32 [ceil(m / bm), ceil(n / bn)]
MM_EXPORT mm_fp8_cast_tiles(const void* x, void* q, void* scales, int64_t m, int64_t n, int bm, int bn, int rule, int e5m2, int dtype,
                            void* stream) {
  if (m == 0 || n == 0) return 0;
  const int64_t tiles = bm > 0 && bn > 0 ? ceil_div(m, bm) * ceil_div(n, bn) : -1;
  if (m < 0 || n < 0 || tiles < 0 || tiles > 0x7fffffff || rule < 0 || rule > 2) return MM_BAD_ARGUMENT;
  const int threads = threads_for(bm * bn, bm == 1 ? 32 : 256);
  return MM_BY_DTYPE(dtype, {
    return MM_LAUNCH((cast_tiles<T>), (unsigned)tiles, threads, 0, stream, (const T*)x, (unsigned char*)q, (float*)scales, m, n, bm, bn, rule, threads > 32, e5m2 != 0);
  });
}

// q [m, n], scales fp32 [ceil(m / bm), ceil(n / bn)] -> out [m, n] in bf16: q times the scale of its tile.
MM_EXPORT mm_fp8_dequantise(const void* q, const void* scales, void* out, int64_t m, int64_t n, int bm, int bn, int e5m2, void* stream) {
  if (m == 0 || n == 0) return 0;
  if (m < 0 || n < 0 || bm < 1 || bn < 1 || ceil_div(m * n, 256) > 0x7fffffff) return MM_BAD_ARGUMENT;
  if (n % 8 == 0 && bn % 8 == 0 && aligned16(out) && (uintptr_t)q % 8 == 0)
    return MM_LAUNCH((spread_tiles<8>), (unsigned)ceil_div(m * n / 8, 256), 256, 0, stream, (const unsigned char*)q, (const float*)scales, (__nv_bfloat16*)out, m * n / 8, n, bm, bn, e5m2 != 0);
  return MM_LAUNCH((spread_tiles<1>), (unsigned)ceil_div(m * n, 256), 256, 0, stream, (const unsigned char*)q, (const float*)scales, (__nv_bfloat16*)out, m * n, n, bm, bn, e5m2 != 0);
}
