// bf16 and half: two bytes in memory, computed with in float and rounded after each operation. Part of lab.h.
// What is handed on straight from memory, as in `__bfloat162float(x[i])`, comes by reference and is touched here: the
// compiler has no call for an argument that is a struct.
namespace lab {
template <class T> LAB LAB_CALLED T taken(const T& v) {
  touch(&v, sizeof v, LOAD, 0, LAB_SITE);
  T copy;
  __builtin_memcpy((void*)&copy, (const void*)&v, sizeof v);
  return copy;
}
LAB inline uint16_t to_bf16(float x) {               // to nearest, ties to even
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
LAB inline float from_bf16(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
LAB inline uint16_t to_half(float x) {
  uint32_t u;
  const float a = std::fabs(x);
  __builtin_memcpy(&u, &x, 4);
  const uint16_t sign = u >> 16 & 0x8000;
  if (a != a) return sign | 0x7e00;
  if (a >= 65520.f) return sign | 0x7c00;
  if (a < 6.103515625e-5f) return sign | (uint16_t)std::nearbyint(a * 16777216.f);
  u &= 0x7fffffffu;
  return sign | (uint16_t)((u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13);
}
LAB inline float from_half(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const float a = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
  return h & 0x8000 ? -a : a;
}
}  // namespace lab
#define LAB_OP(T, op)                                                                                         \
  LAB inline T operator op(const T& a, const T& b) { return T((float)a op (float)b); }                        \
  LAB LAB_CALLED inline T& operator op##=(T& a, const T& b) {                                                 \
    const T result = a op b;                                                                                  \
    lab::touch(&a, 2, lab::STORE, 0, LAB_SITE);                                                               \
    return a = result;                                                                                        \
  }
#define LAB_PAIRS(T2, name, op)                                                                               \
  LAB inline T2 name(const T2& a, const T2& b) {                                                              \
    const T2 p = lab::taken(a), q = lab::taken(b);                                                            \
    return {p.x op q.x, p.y op q.y};                                                                          \
  }
#define LAB_TEST(T, op) LAB inline bool operator op(const T& a, const T& b) { return (float)a op (float)b; }
#define LAB_SIXTEEN(T, T2, to, from)                                                                          \
  struct T {                                                                                                  \
    uint16_t x;                                                                                               \
    T() = default;                                                                                            \
    LAB T(float v) : x(lab::to(v)) {}                                                                         \
    LAB T(double v) : x(lab::to((float)v)) {}                                                                 \
    LAB T(int v) : x(lab::to((float)v)) {}                                                                    \
    LAB T(unsigned v) : x(lab::to((float)v)) {}                                                               \
    LAB T(long long v) : x(lab::to((float)v)) {}                                                              \
    LAB LAB_CALLED operator float() const { return lab::touch(this, 2, lab::LOAD, 0, LAB_SITE), lab::from(x); } \
    LAB T operator-() const { return T(-(float)*this); }                                                      \
  };                                                                                                          \
  struct alignas(4) T2 { T x, y; };                                                                           \
  LAB_OP(T, +) LAB_OP(T, -) LAB_OP(T, *) LAB_OP(T, /)                                                         \
  LAB_TEST(T, <) LAB_TEST(T, >) LAB_TEST(T, <=) LAB_TEST(T, >=) LAB_TEST(T, ==) LAB_TEST(T, !=)               \
  LAB inline T __hadd(const T& a, const T& b) { return a + b; }                                               \
  LAB inline T __hsub(const T& a, const T& b) { return a - b; }                                               \
  LAB inline T __hmul(const T& a, const T& b) { return a * b; }                                               \
  LAB inline T __hdiv(const T& a, const T& b) { return a / b; }                                               \
  LAB inline T __hneg(const T& a) { return -a; }                                                              \
  LAB inline T __habs(const T& a) { return T(std::fabs((float)a)); }                                          \
  LAB inline T __hfma(const T& a, const T& b, const T& c) { return T(std::fma((float)a, (float)b, (float)c)); } \
  LAB inline T __hmax(const T& a, const T& b) { return T(std::fmax((float)a, (float)b)); }                    \
  LAB inline T __hmin(const T& a, const T& b) { return T(std::fmin((float)a, (float)b)); }                    \
  LAB inline bool __hgt(const T& a, const T& b) { return a > b; }                                             \
  LAB inline bool __hlt(const T& a, const T& b) { return a < b; }                                             \
  LAB inline bool __hisnan(const T& a) { return (float)a != (float)a; }                                       \
  LAB inline T hexp(const T& a) { return T(std::exp((float)a)); }                                             \
  LAB inline T hsqrt(const T& a) { return T(std::sqrt((float)a)); }                                           \
  LAB inline T hrsqrt(const T& a) { return T(1.0f / std::sqrt((float)a)); }                                   \
  LAB_PAIRS(T2, operator+, +) LAB_PAIRS(T2, operator-, -) LAB_PAIRS(T2, operator*, *)                         \
  LAB_PAIRS(T2, __hadd2, +) LAB_PAIRS(T2, __hsub2, -) LAB_PAIRS(T2, __hmul2, *)                               \
  LAB inline T2 __hfma2(const T2& a, const T2& b, const T2& c) {                                              \
    const T2 p = lab::taken(a), q = lab::taken(b), r = lab::taken(c);                                         \
    return {__hfma(p.x, q.x, r.x), __hfma(p.y, q.y, r.y)};                                                    \
  }                                                                                                           \
  LAB inline float __low2float(const T2& a) { return a.x; }                                                   \
  LAB inline float __high2float(const T2& a) { return a.y; }
LAB_SIXTEEN(__half, __half2, to_half, from_half)
LAB_SIXTEEN(__nv_bfloat16, __nv_bfloat162, to_bf16, from_bf16)
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
LAB inline __half __float2half(float v) { return v; }
LAB inline __half __float2half_rn(float v) { return v; }
LAB inline float __half2float(const __half& v) { return v; }
LAB inline float2 __half22float2(const __half2& v) { const __half2 a = lab::taken(v); return {(float)a.x, (float)a.y}; }
LAB inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
LAB inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
LAB inline __half2 __float2half2_rn(float v) { return {v, v}; }
LAB inline __half2 __halves2half2(const __half& a, const __half& b) { return {lab::taken(a), lab::taken(b)}; }
LAB inline __half2 __half2half2(const __half& a) { const auto one = lab::taken(a); return {one, one}; }
LAB inline __nv_bfloat16 __float2bfloat16(float v) { return v; }
LAB inline __nv_bfloat16 __float2bfloat16_rn(float v) { return v; }
LAB inline float __bfloat162float(const __nv_bfloat16& v) { return v; }
LAB inline float2 __bfloat1622float2(const __nv_bfloat162& v) { const __nv_bfloat162 a = lab::taken(v); return {(float)a.x, (float)a.y}; }
LAB inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
LAB inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
LAB inline __nv_bfloat162 __float2bfloat162_rn(float v) { return {v, v}; }
LAB inline __nv_bfloat162 __halves2bfloat162(const __nv_bfloat16& a, const __nv_bfloat16& b) { return {lab::taken(a), lab::taken(b)}; }
LAB inline __nv_bfloat162 __bfloat162bfloat162(const __nv_bfloat16& a) { const auto one = lab::taken(a); return {one, one}; }
